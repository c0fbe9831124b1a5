// Averages gradients over the ranks of a group while backward is still running.
//
// A reducer watches the gradients of its parameters. When all gradients of a
// bucket are there, it packs them into one buffer and launches a collective on
// it; when backward returns, every `.grad` holds the average over all ranks.
// It does not know modules, optimizers or data: ddp/ wraps a module.
//
// Example:
//
//   Reducer reducer(parameters, group);
//   for (auto& [input, target] : batches) {
//     optimizer.zero_grad();
//     at::Tensor output = net->forward(input);
//     reducer.prepare_for_backward(output);
//     loss(output, target).backward();
//     optimizer.step();
//   }
//
// A backward without prepare_for_backward() before it accumulates gradients on
// this rank only; the next prepared one reduces the sum.
//
// To know: move and cast parameters before a reducer is made of them. A tensor
// taken from `.grad` changes with the next step while gradients are views. A
// parameter belongs to one reducer at a time. All ranks end an iteration
// together, so an exception in one rank's backward is an error on all; if the
// loss throws before backward has begun, call recover() or
// prepare_for_backward() before anything else that communicates on the group.
//
// docs/protocol.md tells what is launched when, and what happens when something
// fails.
//
// Thread safety: methods may be called from any thread, one at a time;
// gradients may arrive on several threads at once.

#ifndef BRIGADE_REDUCER_REDUCER_H_
#define BRIGADE_REDUCER_REDUCER_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/comm_hooks/hook_traits.h"
#include "brigade/engine/backward_membership.h"
#include "brigade/engine/collective.h"
#include "brigade/engine/collective_error.h"
#include "brigade/engine/last_error.h"
#include "brigade/engine/peer_status.h"
#include "brigade/engine/phase.h"
#include "brigade/engine/timeline.h"
#include "brigade/hooks/gradient_hooks.h"
#include "brigade/hooks/output_tensors.h"
#include "brigade/planning/bucket_plan.h"
#include "brigade/reducer/bucket.h"
#include "brigade/reducer/error_texts.h"
#include "brigade/reducer/graph_history.h"
#include "brigade/reducer/iteration_state.h"
#include "brigade/reducer/memory_ranges.h"
#include "brigade/reducer/observations.h"
#include "brigade/reducer/parameter_table.h"
#include "brigade/reducer/reducer_options.h"
#include "brigade/reducer/reducer_setup.h"
#include "brigade/reducer/statistics.h"

namespace brigade {

// Where Reducer::recover() is called.
enum class SyncPoint { kBeforeForward, kAfterForward };

class Reducer : private GradientListener {
 public:
  // Collective, unless verify_across_ranks is false: every rank of `group`
  // constructs its reducer with the same parameters (number, names, shapes,
  // strides, dtypes) and options. Parameters keep their values; making those
  // equal is the caller's business. Keeps the group alive.
  //
  // Errors: ValueError, on every rank alike, if there is no parameter, one does
  // not require a gradient, is not a leaf, is sparse, is listed twice or is on
  // a device that the group does not serve; names or sparse flags are not one
  // per parameter; a cap is <= 0; the plan misses or repeats a parameter, or
  // mixes dtypes, devices or sparse and dense gradients in a bucket; or ranks
  // differ. On this rank alone if `group` is null, if rebuild_after_iterations
  // is < 1 (its peers wait then), or if verify_across_ranks is false.
  // DistBackendError if a peer has died or does not come in time.
  Reducer(std::vector<at::Tensor> parameters,
          c10::intrusive_ptr<c10d::ProcessGroup> group,
          ReducerOptions options = {});

  // The same for several local replicas of a module, one per device for
  // instance: `replicas[r]` lists the parameters of replica r, alike in number,
  // shapes, strides and dtypes; every rank has equally many. Each iteration
  // runs one forward per replica, one prepare_for_backward on all their outputs
  // and one backward over all; the average is over the replicas of all ranks,
  // and every replica gets it. One collective runs per bucket.
  Reducer(std::vector<std::vector<at::Tensor>> replicas,
          c10::intrusive_ptr<c10d::ProcessGroup> group,
          ReducerOptions options = {});

  // Takes its hooks off the parameters, also while a graph is alive. Does not
  // wait for collectives in flight. Gradients that are views of buckets stay
  // valid. REQUIRES: no backward through the parameters is running.
  ~Reducer();

  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // The next backward will be reduced. Call it on what forward returned, on
  // every rank the same number of times: collective where ranks connect, plan
  // buckets anew or lay them out anew, and free of communication otherwise.
  // `outputs` may be any nest of tensors (hooks/output_tensors.h). May be
  // called again without a backward in between. Does nothing while no parameter
  // requires a gradient.
  //
  // Several backwards may share one preparation, as long as each parameter gets
  // its gradient once; the reduction ends with the last of them.
  //
  // Errors: RuntimeError if the last prepared backward left parameters without
  // gradients that it should have reached, or was not finalized; if a parameter
  // was moved, cast or resized since construction; or, on all ranks alike, if
  // their plans differ. DistBackendError if a peer fails.
  template <typename Outputs>
  void prepare_for_backward(const Outputs& outputs) {
    prepare(tensors_of(outputs));
  }

  // A forward has run whose gradients are to accumulate on this rank only. From
  // here on a backward is reduced only if it goes through outputs that were
  // given to prepare_for_backward() (any, if these have no history to tell by).
  // Free where nothing is prepared.
  void note_local_forward();

  // Launches what peers that reduce an iteration launch, on zeros, and delivers
  // nothing: for a rank that has run out of data. It counts as a prepared
  // iteration. Gradients here are left as they are; marks of parameters used
  // since the last reduction are lost.
  //
  // Collective; peers call prepare_for_backward() and go through a backward.
  // Errors: as prepare_for_backward(), and what that backward raises on them.
  void shadow_iteration();

  // Makes sure that all ranks stand in the same place, before a collective of
  // the caller's own. Collective if ranks may stand in different ones: if there
  // was a forward (prepare_for_backward() or recover()) since the last
  // reduction; free otherwise.
  //
  // Errors, on all ranks alike: RuntimeError if they stood in different places;
  // DistBackendError if one failed. Then they stand in one again, unless
  // can_continue() is false: a peer has died or not answered, or something else
  // was launched in between. RuntimeError on this rank if the last prepared
  // backward left parameters without gradients that it should have reached.
  // Ranks that call it from different places are not in the same one.
  void recover(SyncPoint place = SyncPoint::kBeforeForward);

  // An iteration that has begun gets no more gradients: ends it, if there is
  // one, and tells the peers, who are waited for as failure_patience says.
  // Errors: RuntimeError naming those that are missing, or if
  // finalize_backward() should have been called. None if backward has thrown.
  void end_iteration();

  // Rebuilds the plan now, if prepare_for_backward() would. Collective then.
  // Returns whether it did. Errors: as prepare_for_backward().
  bool rebuild_buckets();

  // From the next iteration on, buckets travel by this hook; null: the default.
  // Collective: to be called on every rank at the same place.
  //
  // Errors: RuntimeError in the middle of an iteration, and on all ranks alike
  // if they differ in the hook's name or in what it puts on the wire;
  // DistBackendError if a peer fails. The hook stays set after such an error.
  void set_comm_hook(std::shared_ptr<c10d::CommHookInterface> hook);

  // What buckets travel by.
  std::shared_ptr<const c10d::CommHookInterface> comm_hook() const;

  // Parameters by bucket, in launch order. Changes once, when it is rebuilt.
  BucketPlan plan() const;

  // Takes the hooks off the parameters: from here on the caller tells when a
  // gradient is ready, by gradient_ready(). For parameters whose data is
  // swapped around each forward, say for a copy in lower precision, which gives
  // them other accumulators. Their gradients are cast to the dtype that the
  // parameter had at construction.
  //
  // Errors: ValueError with find_unused_parameters; RuntimeError in the middle
  // of an iteration.
  void stop_watching_gradients();

  // `.grad` of a parameter holds its gradient of the running backward. Only
  // after stop_watching_gradients(); to be called inside the backward, where
  // the reducer's own hook would be: after the accumulation.
  //
  // Errors: RuntimeError if the reducer watches gradients itself, or there is
  // no backward; ValueError if there is no such parameter; what a gradient that
  // comes by a hook may raise.
  void gradient_ready(size_t parameter, size_t replica = 0);

  // While set, an iteration does not end with its backward, but when
  // finalize_backward() is called: for work that is to overlap with the last
  // collectives. To be set alike on every rank.
  //
  // Errors: RuntimeError between a forward and the end of its iteration.
  void set_manual_finalization(bool required);

  // Whether finalize_backward() has to wait for the end of the backward to
  // come: while the order of gradients is observed, to rebuild buckets from, or
  // a static graph is learnt. If not, a hook in backward may call it, once all
  // gradients are there.
  bool must_finalize_after_backward() const;

  // Waits for the collectives of the iteration, and delivers. Errors:
  // RuntimeError if it is not to be called, there is nothing to finalize, or
  // gradients are missing; what the end of a backward throws otherwise.
  void finalize_backward();

  // What an iteration that has begun still waits for: parameters, ascending.
  // Empty if none has begun.
  std::vector<size_t> missing_gradients() const;

  ReducerStatistics statistics() const;

  // Forward begins. Nobody has to tell: without it the timeline has no forward,
  // and what a forward touches of hooks is not prefetched.
  void forward_begins();

  // Of the last iteration that was sampled and reduced to the end. With buckets
  // on devices with streams, waits for these.
  Timeline timeline() const;

  // Iterations whose timeline is recorded, from the next one on: the first 10,
  // and then every one whose number is a multiple of this. 0: none. At first
  // 100. Others cost a branch per gradient; a recorded one takes the time once
  // per gradient and step of a bucket. Errors: ValueError if it is negative.
  void set_timeline_sample_rate(int64_t sample_rate);

  // A rank that has waited so long for its peers warns, naming those that are
  // late and what they wait for. At first half of the group's timeout, 60 s at
  // most. 0: never. Costs a thread that wakes four times in this time; the
  // store is written to only once a rank waits. Errors: ValueError if it is
  // negative.
  void set_stall_report_after(std::chrono::milliseconds time);

  // Gets the text of that warning instead; null: warn again. Called on a thread
  // that all reducers of the process share, while this reducer waits with its
  // lock held: of its methods the handler may call only last_error() and the
  // two that set stall reports; all others would wait too. What it throws is
  // dropped. The destructor waits until it has returned.
  void set_stall_handler(
      std::function<void(const std::string& report)> handler);

  // What the last method or backward that failed said, and when. Errors of
  // other code that ended a backward are not known here.
  std::optional<ReducerError> last_error() const;

  // Which parameters got gradients on this rank since the last reduction, not
  // counting undefined ones:
  // int32, [num_replicas, num_parameters], on the CPU, 1 or 0. Undefined unless
  // unused parameters are looked for or the graph is static.
  at::Tensor local_used_parameters() const;

  // How many replicas of all ranks had a gradient of each parameter when it was
  // last reduced: int32, [num_parameters], on the CPU; zeros before. Undefined
  // unless unused parameters are looked for or the graph is static, which tells
  // of the first iteration. Waits for the sum. Errors: what the collective
  // throws.
  at::Tensor used_parameter_counts();

  // False once this rank has closed the group's connections, or has found them
  // closed: after a peer has died, left or not answered. Everything on this
  // rank stays usable, but not the group: make a new one, and a new reducer on
  // it. Other errors leave the group usable.
  bool can_continue() const;

  // A collective of the caller's own on the group has failed by the network:
  // closes the group's connections, which ends what peers may be blocked in.
  // can_continue() is false from here on.
  void abandon_group();

  // True if the graph is declared static, or if all iterations so far left the
  // same parameters unused (which find_unused_parameters finds out): then
  // static_graph = true would save the search.
  bool is_graph_static() const;

 private:
  // The plan and the buckets that carry it out.
  struct BoundPlan {
    BucketPlan plan;
    std::vector<Bucket> buckets;
    std::vector<Collective*> sequence;  // the buckets, and the used map
    size_t first_bucket = 0;            // its place there; the others follow
    MemoryRanges memory;                // of the gradients that are views
    uint64_t fingerprint = 0;  // equal on ranks that launch the same lengths
  };

  explicit Reducer(ReducerSetup setup);

  void prepare(const std::vector<at::Tensor>& outputs);
  void on_gradient_ready(VariableIndex variable, bool is_defined) override;
  void on_output_reached(Preparation preparation);
  void on_backward_end(int64_t preparation, int backward_id);
  void on_backward_abandoned(int64_t preparation);

  // REQUIRES: mutex_ held, for all that follow.
  void end_unfinished_iteration();
  bool is_frozen() const;
  void start_iteration();
  std::shared_ptr<IterationState> make_iteration(int64_t number);
  void check_parameters() const;
  void keep_out_of_buckets(VariableIndex variable) const;
  UnusedPrediction predict_unused(const std::vector<at::Tensor>& outputs);
  void enter_backward(int backward_id);
  void watch_end(int backward_id);
  void begin_reduction();
  bool begins_at_outputs() const;
  void accept_early_gradient(VariableIndex variable, bool is_defined,
                             int backward_id);
  void accept_early_gradients(int backward_id);
  void accept_gradient(VariableIndex variable, bool is_defined);
  [[noreturn]] void refuse_gradient(VariableIndex variable) const;
  bool completes_gradient(VariableIndex variable);
  void learn_graph();
  void mark_unused(std::span<const size_t> variables);
  bool has_gradient(VariableIndex variable) const;
  bool mark_ready(VariableIndex variable);  // whether its bucket is full now
  void pack(Bucket& bucket);
  std::vector<size_t> missing_parameters() const;
  size_t entry_of(VariableIndex variable) const;
  void launch_ready();
  void launch(Collective& next);
  bool is_used_map_due() const;
  bool skips_unused_buckets() const;
  void await_used_map();
  void rebuild();
  void follow_strides();
  void adopt(BoundPlan bound);
  BoundPlan bind(BucketPlan plan, const HookTraits& hook);
  void keep_until_done(BoundPlan bound, std::span<const Launch> launches);
  void failed(const std::exception_ptr& error);
  std::shared_ptr<IterationState> take_iteration();
  void leave_sync_point();

  // What becomes of the results (reducer_results.cc).
  struct Failure {
    std::exception_ptr error;
    ErrorSource source = ErrorSource::kFuture;
    Collective* collective = nullptr;
    std::string where = {};  // describes it, which may be gone by then
  };
  Failure failure_of(const IterationState& iteration, ErrorSource source,
                     Collective& collective) const;
  const Launch* failed_map(const IterationState& iteration) const;
  void finalize();
  void deliver_as_results_come(IterationState& iteration, bool is_shadow);
  void deliver_what_all_ranks_have(IterationState& iteration, bool is_shadow);
  std::optional<Failure> launch_chained(IterationState& iteration);
  void await_result(Launch& launch);
  std::optional<Failure> find_unordered_collectives(
      const IterationState& iteration);
  void tell_of_results(IterationState& iteration, RankStatus own,
                       const std::optional<Failure>& failure);
  void release_memory();

  // Where ranks meet, and what follows if one has failed
  // (reducer_recovery.cc).
  void connect();
  void agree_on_plan(IterationState& iteration);
  void begin_with_peers();
  RankStatus begin_status() const;
  void synchronize_idle(SyncPoint place);
  void end_together(IterationState& iteration, const RankStatus& own);
  StatusComparison compare(
      IterationState& iteration, RankStatus own,
      std::optional<std::chrono::milliseconds> patience = std::nullopt);
  void exchange_failed(bool have_met);
  void resync(IterationState& iteration, StatusComparison& comparison);
  void launch_deficit(IterationState& iteration, int64_t num_launches);
  void launch_substitute(IterationState& iteration, Collective& collective);
  void abort_iteration();
  void drain(IterationState& iteration);
  void abort_group(const RankStatus& last_words);
  void abort_group(IterationState& iteration);
  void abandon_buffers(IterationState& iteration);
  std::string describe_place(const Collective& collective,
                             int64_t iteration) const;
  std::string describe_awaited(const IterationState& iteration) const;
  void forget_observations();
  [[noreturn]] void raise(const Failure& failure, int64_t iteration);
  Occasion occasion(int64_t iteration) const;

  void observe_plan();

  // Does not take mutex_ for granted (reducer_progress.cc).
  std::string describe_progress() const;

  // Constant after construction.
  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  ParameterTable table_;

  // Callbacks of a backward hold it while they run.
  std::shared_ptr<GradientHooks> hooks_;

  mutable std::mutex mutex_;
  // Guarded by mutex_.
  ReducerOptions options_;  // constant but for comm_hook, which is never null
  HookTraits hook_;         // of that one
  Observations observations_;
  GraphHistory graph_;
  BoundPlan bound_;
  Phase phase_ = Phase::kAtSyncPoint;
  std::shared_ptr<IterationState> iteration_;  // null iff is_between(phase_)
  BackwardMembership membership_;
  PeerStatus statuses_;
  int64_t hook_since_ = 0;  // the iteration after which the hook was set
  bool finalizes_manually_ = false;
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_REDUCER_H_
