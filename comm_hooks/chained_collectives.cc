#include "brigade/comm_hooks/chained_collectives.h"

#include <c10/util/Exception.h>
#include <pthread.h>

#include <atomic>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "brigade/comm/streams/streams.h"

namespace brigade {
namespace {

using c10::ivalue::Future;
using FuturePtr = c10::intrusive_ptr<Future>;
using std::chrono::milliseconds;

thread_local ChainedCollectives* current = nullptr;

void complete_with(const FuturePtr& result, const FuturePtr& second) {
  second->addCallback([result](Future& done) {
    if (done.hasError()) {
      result->setError(done.exception_ptr());
    } else {
      result->markCompleted(done.value(), done.storages());
    }
  });
}

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

ChainedCollectives::Scope::Scope(ChainedCollectives& collectives)
    : before_(std::exchange(current, &collectives)) {}

ChainedCollectives::Scope::~Scope() { current = before_; }

FuturePtr then_collective(FuturePtr first, NextCollective next) {
  TORCH_CHECK_VALUE(first && next,
                    "then_collective needs the first collective's future and "
                    "what launches the next one, got none");
  if (current == nullptr) {
    first->waitAndThrow();
    return next(first->value());
  }
  auto result =
      c10::make_intrusive<Future>(c10::AnyType::get(), first->devices());
  current->chains_.push_back(
      {.first = std::move(first), .next = std::move(next), .result = result});
  return result;
}

void ChainedCollectives::launch(
    milliseconds timeout,
    const std::function<void(const std::function<void()>&)>& count) {
  auto chains = std::exchange(chains_, {});
  for (size_t i = 0; i < chains.size(); ++i) {
    const Chain& chain = chains[i];
    try {
      TORCH_CHECK(wait_for(*chain.first, timeout),
                  "then_collective: the future of the first collective was not "
                  "done within ",
                  timeout.count() / 1000.0,
                  " s, the group's timeout.\nComplete it on every rank.");
      chain.first->wait();
      if (chain.first->hasError()) {
        chain.result->setError(chain.first->exception_ptr());
        continue;
      }
      count([&] {
        FuturePtr second = chain.next(chain.first->value());
        TORCH_CHECK(second,
                    "then_collective: what launches the next collective must "
                    "return its future, it returned none");
        complete_with(chain.result, second);
      });
    } catch (...) {
      chains_.assign(chains.begin() + static_cast<std::ptrdiff_t>(i),
                     chains.end());
      cancel(milliseconds(0));
      throw;
    }
  }
}

void ChainedCollectives::cancel(milliseconds patience) {
  for (const Chain& chain : std::exchange(chains_, {})) {
    wait_for(*chain.first, patience);
    chain.result->setErrorIfNeeded(std::make_exception_ptr(std::runtime_error(
        "the collective was not launched: its iteration was aborted")));
  }
}

ContinuationWatch::ContinuationWatch()
    : seen_before_(num_seen),
      handle_(at::addGlobalCallback(at::RecordFunctionCallback(look_at).scopes(
          {at::RecordScope::FUNCTION}))) {}

ContinuationWatch::~ContinuationWatch() { at::removeCallback(handle_); }

bool ContinuationWatch::has_seen_any() const {
  return num_seen != seen_before_;
}

}  // namespace brigade
