// State of one iteration: its phase, the launch order of its collectives, and
// their launches, failures and measurements. It lives from prepare() until the
// results are delivered or the iteration is aborted.
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_REDUCER_ITERATION_H_
#define BRIGADE_REDUCER_ITERATION_H_

#include <ATen/ThreadLocalState.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/Device.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "brigade/comm_hooks/comm_hooks.h"
#include "brigade/comm_hooks/hook_traits.h"
#include "brigade/observing/stall_watch.h"
#include "brigade/observing/timeline_recorder.h"
#include "brigade/reducer/backward_membership.h"
#include "brigade/reducer/collective.h"
#include "brigade/reducer/peer_status.h"

namespace brigade {

// ---- Observation

// A range in profiles for the object's lifetime.
class ProfilerRange {
 public:
  // REQUIRES: `name` outlives this object.
  explicit ProfilerRange(const std::string& name);
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;

 private:
  std::optional<at::RecordFunction> function_;
};

// Counts, timeline and progress of all iterations.
struct Observations {
  // Sets the buckets' number and devices, in launch order.
  void bind(std::vector<c10::Device> devices, size_t num_variables);

  void iteration_begins(int64_t iteration);
  // `future`: null if there is nothing to wait for.
  void launched(size_t unit, c10::ivalue::Future* future);

  ReducerStatistics counts;
  TimelineRecorder timeline;
  std::vector<std::string> pack_names = {};    // of profiler ranges, by bucket
  std::vector<std::string> launch_names = {};  // likewise
  const std::string finalize_name = "brigade: finalize";
  const std::shared_ptr<Progress> progress = std::make_shared<Progress>();
};

// ---- Failure of a collective

enum class ErrorSource {
  kHook,      // thrown by the call of the comm hook
  kFuture,    // held by the future that the hook returned
  kDelivery,  // thrown while the result was written to the gradients
};

struct Failure {
  std::exception_ptr error;
  ErrorSource source = ErrorSource::kFuture;
  Collective* collective = nullptr;
  std::string where = {};  // for messages after the collective is destroyed
};

// Returns a failure with the current exception.
Failure failure_of(IterationId id, ErrorSource source, Collective& collective);

// Returns true for a DistBackendError; without user code in the collective, for
// all errors but a wrong value or type; with it, also for an error in the
// future that is not a c10::Error (Gloo throws its own).
bool is_peer_failure(const Failure& failure);

// Rethrows the error with its place in the text. A c10::Error keeps its type;
// any other exception becomes a RuntimeError.
[[noreturn]] void rethrow_hook_error(const Failure& failure);

// "bucket 1 of 3 (parameter 4) in iteration 17 on rank 2".
std::string describe_place(const Collective& collective, IterationId id);

// ---- The sequence of collectives

// Cursor over the sequence. An entry is launched when its gradients are ready
// and all entries before it are launched, so all ranks launch in one order.
class LaunchOrder {
 public:
  // `num_pending`: the number of marks that each entry waits for.
  explicit LaunchOrder(std::vector<uint32_t> num_pending)
      : num_pending_(std::move(num_pending)) {}

  // Returns true for the entry's last mark. REQUIRES: it waits for one.
  bool mark(size_t entry) { return --num_pending_[entry] == 0; }

  void mark_all() { std::ranges::fill(num_pending_, 0); }

  // Returns the first entry that is not launched, if it is ready.
  std::optional<size_t> next() const {
    if (all_launched() || num_pending_[next_] > 0) return std::nullopt;
    return next_;
  }

  // REQUIRES: next() returns an entry.
  void launched() { ++next_; }

  bool is_launched(size_t entry) const { return entry < next_; }
  bool all_launched() const { return next_ == num_pending_.size(); }

 private:
  std::vector<uint32_t> num_pending_;  // by entry
  size_t next_ = 0;
};

LaunchOrder launch_order_of(std::span<Collective* const> sequence);

struct Launch {
  Collective* collective = nullptr;
  c10::intrusive_ptr<c10::ivalue::Future> future;  // null: nothing to wait for
  bool has_timed_out = false;
};

inline bool is_pending(const Launch& launch) {
  return launch.future && !launch.future->completed();
}

// Count the buckets, without the used-parameter map.
int64_t num_units(std::span<Collective* const> sequence);
int64_t num_units(std::span<const Launch> launches);

// ---- The iteration

// docs/internals.md, "Phases", lists the transitions.
enum class Phase {
  // Not begun.
  kPrepared,  // forward has run
  kReached,   // a backward runs through the outputs; no gradient is ready

  // Begun.
  kReducing,   // a backward brings gradients, or peers' launches are shadowed
  kSuspended,  // between two such backwards, or before finalize_backward()

  // Failed. Nothing is launched.
  kFailed,  // peers do not know
  kOver,    // peers know, or the group is closed
};

struct Iteration {
  Iteration(Preparation prepared_by, int rank,
            std::span<Collective* const> launch_sequence, size_t num_variables);

  const Preparation preparation;
  const int64_t number;
  const IterationId id;
  Phase phase = Phase::kPrepared;
  std::chrono::steady_clock::time_point suspended_at = {};
  bool has_reported_missing = false;
  bool creates_graph = false;             // backward(create_graph=True)
  bool is_shadow = false;                 // this rank contributes zeros
  bool has_compared_begin = false;        // ranks have exchanged Begin statuses
  const at::ThreadLocalState preparer;    // of the thread that prepared
  std::span<Collective* const> sequence;  // in launch order
  LaunchOrder order;                      // of the sequence
  std::vector<char> is_ready;             // by number of the variable
  std::vector<Launch> launches;           // without a launch that threw
  ChainedCollectives chained;
  std::optional<ContinuationWatch> continuations;  // of a user's new comm hook
  std::string failure;  // text of the first error, sent to the other ranks

  bool has_begun() const { return phase >= Phase::kReducing; }
  bool has_failed() const { return phase >= Phase::kFailed; }
  // Stops launches. Keeps the text of the first error.
  void fail(const std::exception_ptr& error);
};

// Returns the variables whose gradients are not ready, ascending.
std::vector<size_t> missing(const Iteration& iteration);

// Returns the bucket that is launched next, or the number of buckets.
int64_t next_unit(const Iteration& iteration);

// Thread-local state of packs, launches and deliveries: the preparing thread's
// (profilers, dispatch modes) without autograd and autocast, as in torch.
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

// REQUIRES: the entry's gradients are ready; a HookScope. Throws as
// Collective::pack().
void pack(const Iteration& iteration, size_t entry, Observations& observations);

// Launches the ready entries in order; on zeros if the iteration is a shadow.
// Returns the first failure. REQUIRES: a HookScope.
std::optional<Failure> launch_ready(Iteration& iteration, PeerStatus& peers,
                                    Observations& observations);

// Launches the remaining entries of a failed iteration on zeros. Throws as
// Collective::launch_substitute().
void launch_rest(Iteration& iteration, PeerStatus& peers,
                 Observations& observations);

// Launches the collectives given to then_collective() (comm_hooks/comm_hooks.h)
// in the order of the sequence. Waits `timeout` at most for each first one.
std::optional<Failure> launch_chained(Iteration& iteration, PeerStatus& peers,
                                      std::chrono::milliseconds timeout);

// Returns a failure if a user's hook launched collectives in continuations,
// which run in a different order on each rank. A single bucket has one order.
std::optional<Failure> find_unordered_collectives(const Iteration& iteration,
                                                  const HookTraits& hook);

}  // namespace brigade

#endif  // BRIGADE_REDUCER_ITERATION_H_
