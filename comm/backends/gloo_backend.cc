#include "brigade/comm/backends/gloo_backend.h"

#include <ATen/record_function.h>
#include <gloo/context.h>
#include <gloo/transport/unbound_buffer.h>
#include <pthread.h>
#include <time.h>

#include <exception>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "brigade/comm/group/group_info.h"

namespace brigade {
namespace {

using c10d::ProcessGroupGloo;

// Gives access to a protected member.
struct OpenGloo : ProcessGroupGloo {
  static constexpr auto kContexts = &OpenGloo::contexts_;
};

ProcessGroupGloo* find_gloo(c10d::ProcessGroup& group) {
  return dynamic_cast<ProcessGroupGloo*>(find_backend(group, at::kCPU).get());
}

sigset_t only_sigpipe() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGPIPE);
  return signals;
}

bool is_sigpipe_pending() {
  sigset_t pending;
  sigpending(&pending);
  return sigismember(&pending, SIGPIPE) == 1;
}

// The caller blocks SIGPIPE.
c10::intrusive_ptr<c10d::Backend> connect(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
    const c10::intrusive_ptr<ProcessGroupGloo::Options>& options) {
  auto backend =
      c10::make_intrusive<ProcessGroupGloo>(store, rank, world_size, options);
  // A profiler that sees the barrier begin may be gone when it ends.
  const at::DisableRecordFunctionGuard not_profiled;
  // Without it, a peer that is still connecting fails if this rank ends now.
  backend->barrier()->wait();
  return backend;
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_gloo_backend(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
    std::chrono::milliseconds timeout) {
  // Options start a thread, too.
  const SigpipeBlock inherited_by_threads;
  return connect(store, rank, world_size,
                 ProcessGroupGloo::Options::create_default(timeout));
}

c10::intrusive_ptr<c10d::Backend> make_second_gloo_backend(
    c10d::ProcessGroup& group, const c10::intrusive_ptr<c10d::Store>& store,
    std::chrono::milliseconds timeout) {
  const SigpipeBlock inherited_by_threads;
  ProcessGroupGloo* const gloo = find_gloo(group);
  auto options =
      gloo ? c10::make_intrusive<ProcessGroupGloo::Options>(*gloo->getOptions())
           : ProcessGroupGloo::Options::create_default(timeout);
  options->timeout = timeout;
  return connect(store, group.getRank(), group.getSize(), options);
}

bool has_gloo_backend(c10d::ProcessGroup& group) {
  return find_gloo(group) != nullptr;
}

bool end_gloo_operations_of(c10d::Backend& backend) {
  auto* const gloo = dynamic_cast<ProcessGroupGloo*>(&backend);
  if (gloo == nullptr) return false;
  for (const auto& context : gloo->*OpenGloo::kContexts) {
    char unused = 0;
    auto buffer = context->createUnboundBuffer(&unused, sizeof(unused));
    try {
      buffer->waitRecv(std::chrono::milliseconds(1));
    } catch (const std::exception&) {
      // The timeout.
    }
  }
  return true;
}

SigpipeBlock::SigpipeBlock() {
  const sigset_t sigpipe = only_sigpipe();
  pthread_sigmask(SIG_BLOCK, &sigpipe, &before_);
  was_pending_ = is_sigpipe_pending();
}

SigpipeBlock::~SigpipeBlock() {
  if (!was_pending_ && is_sigpipe_pending()) {
    const sigset_t sigpipe = only_sigpipe();
    const timespec at_once = {};
    sigtimedwait(&sigpipe, nullptr, &at_once);
  }
  pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

}  // namespace brigade
