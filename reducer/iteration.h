// The state of one iteration, and the launch of its collectives. It is made
// when a backward is prepared, and dropped when the results have been delivered
// or the iteration is aborted.
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_REDUCER_ITERATION_H_
#define BRIGADE_REDUCER_ITERATION_H_

#include <ATen/ThreadLocalState.h>
#include <ATen/core/ivalue.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "brigade/comm_hooks/comm_hooks.h"
#include "brigade/comm_hooks/hook_traits.h"
#include "brigade/planning/launch_order.h"
#include "brigade/reducer/backward_membership.h"
#include "brigade/reducer/collective.h"
#include "brigade/reducer/observations.h"
#include "brigade/reducer/peer_status.h"

namespace brigade {

// docs/protocol.md, "Phases", says how one leads to another.
enum class Phase {
  // Not begun.
  kPrepared,  // forward is done
  kReached,   // a backward goes through it; no gradient has come

  // Begun.
  kReducing,   // in a backward that brings gradients, or a shadow of its peers'
  kSuspended,  // between two such backwards, or waiting to be finalized

  // An error, which is on its way out, has ended it: nothing is launched.
  kFailed,  // peers do not know yet
  kOver,    // peers know, or the group is closed
};

struct Launch {
  Collective* collective = nullptr;
  c10::intrusive_ptr<c10::ivalue::Future> future;  // null: nothing to await
  bool is_overdue = false;  // was waited for as long as anything is
};

inline bool is_pending(const Launch& launch) {
  return launch.future && !launch.future->completed();
}

struct Iteration {
  Iteration(Preparation prepared_by, int rank,
            std::span<Collective* const> sequence_of_it, size_t num_variables);

  const Preparation preparation;
  const int64_t number;  // that its backward makes it
  const Occasion occasion;
  Phase phase = Phase::kPrepared;
  bool creates_graph = false;             // its backward does
  bool is_shadow = false;                 // this rank contributes nothing
  bool has_begun_together = false;        // ranks have compared where it begins
  const at::ThreadLocalState preparer;    // of the thread that prepared
  std::span<Collective* const> sequence;  // launched in this order
  LaunchOrder order;                      // of the sequence
  std::vector<char> is_ready;             // by number of the variable
  std::vector<Launch> launches;           // without the one that threw
  ChainedCollectives chained;
  std::optional<ContinuationWatch> continuations;  // of a user's new hook
  std::string failure;  // the first error, sent to the other ranks

  bool has_begun() const { return phase >= Phase::kReducing; }
  bool is_ending() const { return phase >= Phase::kFailed; }
  // Nothing is launched any more. The first error's text is kept.
  void fail(const std::exception_ptr& error);
};

LaunchOrder launch_order_of(std::span<Collective* const> sequence);

int64_t num_units(std::span<Collective* const> sequence);
int64_t num_units(std::span<const Launch> launches);

// Variables whose gradients are not ready, ascending.
std::vector<size_t> missing(const Iteration& iteration);

// The unit that is to be launched next, or how many there are: where an
// iteration that fails has come to.
int64_t next_unit(const Iteration& iteration);

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

// Packs an entry whose gradients are all there. REQUIRES: a HookScope. Errors:
// the entry's.
void pack(const Iteration& iteration, size_t entry, Observations& observations);

// Launches the entries that are ready; substitutes if the iteration is a
// shadow. Stops at one that throws, and returns why. REQUIRES: a HookScope.
std::optional<Failure> launch_ready(Iteration& iteration, PeerStatus& peers,
                                    Observations& observations);

// Launches zeros for all of an aborted iteration that has not been launched,
// and does not wait. Throws a collective's errors.
void launch_rest(Iteration& iteration, PeerStatus& peers,
                 Observations& observations);

// Launches second collectives, which comm hooks have chained to their first
// ones (comm_hooks/comm_hooks.h): in the order of the sequence on every
// rank, on the calling thread. Waits for each first one `timeout` at most.
std::optional<Failure> launch_chained(Iteration& iteration, PeerStatus& peers,
                                      std::chrono::milliseconds timeout);

// Collectives that a hook launched by itself, in a continuation of its future,
// are a failure: continuations run in another order on each rank. One unit has
// but one order.
std::optional<Failure> find_unordered_collectives(const Iteration& iteration,
                                                  const HookTraits& hook);

}  // namespace brigade

#endif  // BRIGADE_REDUCER_ITERATION_H_
