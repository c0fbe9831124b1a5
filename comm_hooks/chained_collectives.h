// Second collectives of comm hooks: launches those that hooks have given to
// then_collective(), and notices those that continuations launch.

#ifndef BRIGADE_COMM_HOOKS_CHAINED_COLLECTIVES_H_
#define BRIGADE_COMM_HOOKS_CHAINED_COLLECTIVES_H_

#include <ATen/record_function.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <vector>

#include "brigade/comm_hooks/comm_hooks.h"

namespace brigade {

// The collectives of one iteration that then_collective() was given.
//
// Thread safety: none.
class ChainedCollectives {
 public:
  // While it lives, then_collective() on this thread adds to `collectives`.
  class Scope {
   public:
    explicit Scope(ChainedCollectives& collectives);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    ChainedCollectives* const before_;
  };

  bool empty() const { return chains_.empty(); }

  // Launches them in the order in which they were added, each by `count`, which
  // calls what it is given. A first collective that failed hands its error on.
  // Errors: what one throws, RuntimeError if a first one is not done within
  // `timeout`; the others are cancelled then.
  void launch(std::chrono::milliseconds timeout,
              const std::function<void(const std::function<void()>&)>& count);

  // They will not be launched: their futures end with an error. Waits for each
  // of the first ones so long.
  void cancel(std::chrono::milliseconds patience);

 private:
  friend HookFuturePtr then_collective(HookFuturePtr first,
                                       NextCollective next);

  struct Chain {
    HookFuturePtr first;
    NextCollective next;
    HookFuturePtr result;
  };

  std::vector<Chain> chains_;
};

// Tells whether continuations launch collectives: on threads of a backend.
// Watches all operations of the process by a callback of the dispatcher's, some
// 100 ns each: for the first iterations of a hook, not for all.
//
// Thread safety: made and destroyed by one thread.
class ContinuationWatch {
 public:
  ContinuationWatch();
  ~ContinuationWatch();
  ContinuationWatch(const ContinuationWatch&) = delete;
  ContinuationWatch& operator=(const ContinuationWatch&) = delete;

  // Of the process, since this was made: on Gloo's threads.
  bool has_seen_any() const;

 private:
  const int64_t seen_before_;
  const at::CallbackHandle handle_;
};

}  // namespace brigade

#endif  // BRIGADE_COMM_HOOKS_CHAINED_COLLECTIVES_H_
