#include "brigade/comm_hooks/continuation_watch.h"

#include <pthread.h>

#include <atomic>
#include <memory>
#include <string_view>

namespace brigade {
namespace {

std::atomic<int64_t> num_seen = 0;

// LibTorch's name for them, cut to what the system keeps.
constexpr std::string_view kGlooThread = "pt_gloo_runloop";
constexpr std::string_view kCollectives = "c10d::";

bool is_on_gloo_thread() {
  char name[16] = {};  // as long as names may be
  pthread_getname_np(pthread_self(), name, sizeof(name));
  return std::string_view(name) == kGlooThread.substr(0, sizeof(name) - 1);
}

std::unique_ptr<at::ObserverContext> look_at(const at::RecordFunction& call) {
  if (std::string_view(call.name()).starts_with(kCollectives) &&
      is_on_gloo_thread()) {
    ++num_seen;
  }
  return nullptr;
}

}  // namespace

ContinuationWatch::ContinuationWatch()
    : seen_before_(num_seen),
      handle_(at::addGlobalCallback(at::RecordFunctionCallback(look_at).scopes(
          {at::RecordScope::FUNCTION}))) {}

ContinuationWatch::~ContinuationWatch() { at::removeCallback(handle_); }

bool ContinuationWatch::has_seen_any() const {
  return num_seen != seen_before_;
}

}  // namespace brigade
