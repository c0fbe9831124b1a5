// A second collective behind the first one of a comm hook.
//
// A continuation of the first one's future must not launch it: continuations
// run as collectives complete, in another order on each rank, and so the second
// collectives would meet the wrong ones.  Those given to then_collective() are
// launched in the order of the buckets, when backward ends and the first ones
// are complete.  Nothing is waited for before.
//
//   auto hook = make_comm_hook([group](c10d::GradBucket& bucket) {
//     auto shards = ...;
//     return then_collective(group->_reduce_scatter_base(...)->getFuture(),
//                            [group](const c10::IValue& reduced) {
//       return group->_allgather_base(...)->getFuture();
//     });
//   });
//
// Thread safety: then_collective() is called by a hook, on the thread that runs
// it.

#ifndef BRIGADE_COMM_HOOKS_THEN_COLLECTIVE_H_
#define BRIGADE_COMM_HOOKS_THEN_COLLECTIVE_H_

#include <ATen/core/ivalue.h>

#include <chrono>
#include <functional>
#include <vector>

namespace brigade {

// Launches the second collective, given the value of the first, and returns its
// future.  What it throws comes out of backward, and ends the group's use: its
// peers wait for the collective.
using NextCollective =
    std::function<c10::intrusive_ptr<c10::ivalue::Future>(const c10::IValue&)>;

// Returns a future of what `next`'s future will hold.  Outside of a reducer's
// comm hook, waits for `first` and calls `next` at once.
c10::intrusive_ptr<c10::ivalue::Future> then_collective(
    c10::intrusive_ptr<c10::ivalue::Future> first, NextCollective next);

// The second collectives of an iteration, for whoever runs the hooks.
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
  // calls what it is given.  A first collective that failed hands its error on.
  // Errors: what one throws, RuntimeError if a first one is not done within
  // `timeout`; the others are cancelled then.
  void launch(std::chrono::milliseconds timeout,
              const std::function<void(const std::function<void()>&)>& count);

  // They will not be launched: their futures end with an error.  Waits for each
  // of the first ones so long.
  void cancel(std::chrono::milliseconds patience);

 private:
  friend c10::intrusive_ptr<c10::ivalue::Future> then_collective(
      c10::intrusive_ptr<c10::ivalue::Future> first, NextCollective next);

  struct Chain {
    c10::intrusive_ptr<c10::ivalue::Future> first;
    NextCollective next;
    c10::intrusive_ptr<c10::ivalue::Future> result;
  };

  std::vector<Chain> chains_;
};

}  // namespace brigade

#endif  // BRIGADE_COMM_HOOKS_THEN_COLLECTIVE_H_
