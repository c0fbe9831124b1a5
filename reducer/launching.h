// Launches the entries of an iteration's sequence, in order.
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_REDUCER_LAUNCHING_H_
#define BRIGADE_REDUCER_LAUNCHING_H_

#include <ATen/ThreadLocalState.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <chrono>
#include <cstddef>
#include <optional>

#include "brigade/comm_hooks/hook_traits.h"
#include "brigade/reducer/collective.h"
#include "brigade/reducer/iteration.h"
#include "brigade/reducer/observations.h"
#include "brigade/reducer/peer_status.h"

namespace brigade {

// The thread-local state under which an entry is packed, launched and
// delivered: that of the thread that prepared the backward (profilers, dispatch
// modes), but without autograd and autocast. Source: torch runs comm hooks so.
class HookScope {
 public:
  explicit HookScope(const at::ThreadLocalState& preparer)
      : as_preparer_(preparer), no_autocast_(c10::autocast_dispatch_keyset) {}
  HookScope(const HookScope&) = delete;
  HookScope& operator=(const HookScope&) = delete;

 private:
  const at::ThreadLocalStateGuard as_preparer_;
  const at::NoGradGuard no_grad_;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast_;
};

// One of those that `entry` waits for is there: packs it if that was the last.
// Returns whether it was. Errors: what packing throws.
bool mark_and_pack(Iteration& iteration, size_t entry,
                   Observations& observations);

// Launches the entries that are ready; substitutes if the iteration is a
// shadow. Stops at one that throws, and returns why.
std::optional<Failure> launch_ready(Iteration& iteration, PeerStatus& peers,
                                    Observations& observations);

// Launches zeros for all of an aborted iteration that has not been launched,
// and does not wait. Throws what a collective throws.
void launch_rest(Iteration& iteration, PeerStatus& peers,
                 Observations& observations);

// Launches second collectives, which comm hooks have chained to their first
// ones (comm_hooks/then_collective.h): in the order of the sequence on every
// rank, on the calling thread. Waits for each first one `timeout` at most.
std::optional<Failure> launch_chained(Iteration& iteration, PeerStatus& peers,
                                      std::chrono::milliseconds timeout);

// Collectives that a hook launched by itself, in a continuation of its future,
// are a failure: continuations run in another order on each rank. One unit has
// but one order.
std::optional<Failure> find_unordered_collectives(const Iteration& iteration,
                                                  const HookTraits& hook);

}  // namespace brigade

#endif  // BRIGADE_REDUCER_LAUNCHING_H_
