// State of one iteration: the backwards that belong to it, its phase, the
// launch order of its collectives, and their launches, failures and
// measurements. It lives from prepare() until the results are delivered or the
// iteration is aborted.
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
#include "brigade/planning/bucket_plan.h"
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

// ---- Membership of backwards

// A forward whose backward will be reduced.
struct Preparation {
  int64_t number = 0;     // counts prepare() on this rank, from 1
  int64_t iteration = 0;  // counts reductions, equal on all ranks; several
                          // preparations may have the same
};

// A gradient that became ready before its backward was assigned.
struct EarlyGradient {
  VariableIndex variable = {};
  bool is_defined = true;
  int backward_id = 0;
};

// Assigns backwards to the prepared iteration, to a finished one, or to a local
// forward. A reentrant backward has a later id than the backward that it runs
// in.
class BackwardMembership {
 public:
  // An iteration is prepared: any backward may belong to it.
  // `outputs_are_watched`: output_reached() will be called.
  void prepared(bool outputs_are_watched);

  // A local forward has run, which is not reduced. If the prepared outputs are
  // watched, only backwards that reach them belong to the iteration from now
  // on.
  void note_local_forward();

  // The backward has reached an output of a local forward. Returns true for the
  // first output; local_backward_ended() is called later then.
  bool local_output_reached(int backward_id);
  void local_backward_ended(int backward_id);

  // Returns true if the backward, or one around it, has reached such outputs.
  bool is_local(int backward_id) const;

  // Returns true if the backward may be of a local forward: it has not reached
  // the prepared outputs. REQUIRES: no backward of the iteration runs.
  bool is_undecided(int backward_id) const;

  // Keeps a gradient until its backward reaches the prepared outputs, or until
  // the next prepared().
  void keep_early(const EarlyGradient& gradient) { early_.push_back(gradient); }

  // Returns the kept gradients of the backward and of those inside it, and
  // forgets all others.
  std::vector<EarlyGradient> take_early_gradients(int backward_id);

  // This iteration, with all prepared before it, was reduced or aborted.
  // `may_be_repeated`: its backward created a graph, so a later backward
  // through the same outputs computes higher derivatives.
  void mark_finished(Preparation preparation, bool may_be_repeated);

  bool is_finished(Preparation preparation) const {
    return preparation.number <= last_finished_;
  }

  // The backward has reached an output of `preparation`.
  void output_reached(Preparation preparation, int backward_id);

  // Returns the finished iteration whose outputs the backward has reached;
  // nullopt if there is none, or if it may be repeated.
  std::optional<int64_t> finished_iteration_of(int backward_id) const;

 private:
  enum class Outputs { kUnwatched, kWatched, kRequired };

  Outputs outputs_ = Outputs::kUnwatched;  // of the prepared forward
  std::vector<EarlyGradient> early_;
  std::vector<int> local_backwards_;  // ids of running ones
  int64_t last_finished_ = 0;         // number of a preparation
  int64_t last_repeatable_ = 0;       // likewise
  Preparation reached_;
  std::optional<int> reached_by_;  // id of a backward
};

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
// Collective::launch().
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
