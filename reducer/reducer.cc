#include "brigade/reducer/reducer.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "brigade/comm/end_on_own_thread.h"
#include "brigade/comm/peer_error.h"
#include "brigade/comm/status_bridge.h"
#include "brigade/comm_hooks/all_reduce_hook.h"
#include "brigade/engine/hook_scope.h"
#include "brigade/hooks/backward_end.h"
#include "brigade/hooks/graph_search.h"
#include "brigade/hooks/output_watch.h"
#include "brigade/planning/plan_by_size.h"
#include "brigade/reducer/plan_fingerprint.h"

namespace brigade {
namespace {

// Of a user's hook, to see whether its continuations launch collectives.
constexpr int64_t kWatchedIterations = 5;

}  // namespace

Reducer::Reducer(std::vector<at::Tensor> parameters,
                 c10::intrusive_ptr<c10d::ProcessGroup> group,
                 ReducerOptions options)
    : Reducer(checked_setup({std::move(parameters)}, std::move(group),
                            std::move(options))) {}

Reducer::Reducer(std::vector<std::vector<at::Tensor>> replicas,
                 c10::intrusive_ptr<c10d::ProcessGroup> group,
                 ReducerOptions options)
    : Reducer(checked_setup(std::move(replicas), std::move(group),
                            std::move(options))) {}

Reducer::Reducer(ReducerSetup setup)
    : group_(std::move(setup.group)),
      table_(std::move(setup.table)),
      hooks_(std::make_shared<GradientHooks>(
          table_.replicas(), static_cast<GradientListener&>(*this))),
      options_(std::move(setup.options)),
      hook_(traits_of(*options_.comm_hook)),
      graph_(options_, table_, *hooks_, *group_),
      bound_(bind(std::move(setup.plan), hook_)),
      statuses_(group_) {
  observe_plan();
  statuses_.compare_others(!hook_.fails_by_network_only);
  if (!options_.verify_across_ranks) {
    statuses_.connect_later();
    return;
  }
  connect();
  // What ranks have compared decides on the plan.
  statuses_.set_agreed(bound_.fingerprint);
}

Reducer::~Reducer() {
  observations_.stall_watch = nullptr;  // asks this object

  // A backward that failed may tell of it a little late, on another thread.
  const std::weak_ptr<GradientHooks> callbacks = hooks_;
  hooks_ = nullptr;
  while (!callbacks.expired()) std::this_thread::yield();

  if (iteration_ && std::ranges::any_of(iteration_->launches, is_pending)) {
    keep_until_done(std::move(bound_), iteration_->launches);
  }
}

// Collectives in flight go on; they keep their buckets, the memory of the used
// map's sum, and the hook, whose continuations they run. The hook may own its
// group.
void Reducer::keep_until_done(BoundPlan bound,
                              std::span<const Launch> launches) {
  at::Tensor sum = graph_.used ? graph_.used->abandon() : at::Tensor();
  const auto kept = end_on_own_thread(
      std::tuple(std::move(bound), std::move(sum), options_.comm_hook));
  for (const Launch& launch : launches) {
    if (!launch.future) continue;
    launch.future->addCallback([kept](c10::ivalue::Future&) {},
                               /*uses_future=*/false);
  }
}

std::shared_ptr<const c10d::CommHookInterface> Reducer::comm_hook() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return options_.comm_hook;
}

BucketPlan Reducer::plan() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return bound_.plan;
}

ReducerStatistics Reducer::statistics() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  ReducerStatistics statistics = observations_;
  if (graph_.unused_search) {
    statistics.graph_searches = graph_.unused_search->num_searches();
  }
  return statistics;
}

std::vector<size_t> Reducer::missing_gradients() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!has_begun(phase_)) return {};
  return missing_parameters();
}

bool Reducer::rebuild_buckets() try {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (has_begun(phase_)) return false;
  if (!graph_.ready_order.is_pending()) return false;
  rebuild();
  return true;
} catch (...) {
  observations_.note_error();
  throw;
}

void Reducer::set_comm_hook(std::shared_ptr<c10d::CommHookInterface> hook) try {
  const std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(!has_begun(phase_), "Reducer::set_comm_hook: ",
              describe(occasion(observations_.begun)),
              " is being reduced.\nSet the hook before the backward or after "
              "it.");
  if (!hook) hook = all_reduce_hook(group_);
  HookTraits traits = traits_of(*hook);
  if (std::ranges::all_of(bound_.buckets, [&](const Bucket& bucket) {
        return bucket.fits(traits);
      })) {
    bound_.fingerprint = plan_fingerprint(bound_.plan, table_, traits);
    for (Bucket& bucket : bound_.buckets) bucket.set_hook(traits);
  } else {
    adopt(bind(bound_.plan, traits));
  }
  options_.comm_hook = std::move(hook);
  hook_ = std::move(traits);
  statuses_.compare_others(!hook_.fails_by_network_only);
  hook_since_ = observations_.begun;
  // Later ranks may be in different places.
  if (statuses_.is_connected()) {
    agree_on_plan(*make_iteration(observations_.begun + 1));
  }
} catch (...) {
  observations_.note_error();
  throw;
}

std::shared_ptr<IterationState> Reducer::make_iteration(int64_t number) {
  std::span<Collective* const> sequence = bound_.sequence;
  if (graph_.used && !is_used_map_due()) {
    sequence = sequence.first(bound_.buckets.size());
  }
  return std::make_shared<IterationState>(
      Preparation{.number = observations_.prepared, .iteration = number},
      sequence, table_.num_variables());
}

at::Tensor Reducer::local_used_parameters() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return graph_.used ? graph_.used->local().clone() : at::Tensor();
}

at::Tensor Reducer::used_parameter_counts() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return graph_.used ? graph_.used->counts().clone() : at::Tensor();
}

bool Reducer::is_graph_static() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return options_.static_graph ||
         (graph_.unused_search && graph_.unused_search->is_static());
}

void Reducer::note_local_forward() {
  const std::lock_guard<std::mutex> lock(mutex_);
  membership_.note_local_forward();
}

void Reducer::end_iteration() try {
  const std::lock_guard<std::mutex> lock(mutex_);
  end_unfinished_iteration();
} catch (...) {
  observations_.note_error();
  throw;
}

void Reducer::recover(SyncPoint place) try {
  const std::lock_guard<std::mutex> lock(mutex_);
  end_unfinished_iteration();
  if (phase_ != Phase::kAtSyncPoint) synchronize_idle(place);
  leave_sync_point();
} catch (...) {
  observations_.note_error();
  throw;
}

// Peers may be in an iteration that this rank has not begun.
void Reducer::synchronize_idle(SyncPoint place) {
  end_together(*make_iteration(observations_.begun),
               {.kind = StatusKind::kIdle,
                .unit = place == SyncPoint::kAfterForward ? 0 : -1});
}

// The place where ranks met last is left when this one goes on to a forward, or
// to what it launches for other purposes.
void Reducer::leave_sync_point() {
  if (phase_ == Phase::kAtSyncPoint) phase_ = Phase::kIdle;
}

// An iteration that has begun and is not over will get no more gradients.
void Reducer::end_unfinished_iteration() {
  if (!has_begun(phase_)) return;
  // A backward whose end has not been told has thrown, on another thread.
  if (phase_ != Phase::kSuspended) return abort_iteration();
  TORCH_CHECK(!finalizes_manually_ || !iteration_->order.all_launched(),
              describe_missing_finalization(occasion(iteration_->iteration)));
  iteration_->failure = describe_missing_gradients(
      table_, missing_parameters(), occasion(iteration_->iteration), options_);
  const std::string text = iteration_->failure;
  abort_iteration();
  TORCH_CHECK(false, text);
}

void Reducer::prepare(const std::vector<at::Tensor>& outputs) try {
  const std::lock_guard<std::mutex> lock(mutex_);
  end_unfinished_iteration();
  if (is_frozen()) {
    take_iteration();
    return;
  }
  start_iteration();
  iteration_->prediction = predict_unused(outputs);
  if (graph_.hook_counts) graph_.hook_counts->restart();
  membership_.prepared(watch_outputs(
      outputs, hooks_, [this, preparation = iteration_->preparation] {
        on_output_reached(preparation);
      }));
  observations_.timeline.prepared(iteration_->iteration);
} catch (...) {
  observations_.note_error();
  throw;
}

// No backward brings gradients, whatever it goes through: a discriminator's
// while the generator is trained.
bool Reducer::is_frozen() const {
  for (const std::vector<at::Tensor>& replica : table_.replicas()) {
    for (const at::Tensor& parameter : replica) {
      if (parameter.requires_grad()) return false;
    }
  }
  return true;
}

void Reducer::start_iteration() {
  take_iteration();
  check_parameters();
  if (graph_.ready_order.is_pending()) rebuild();
  if (table_.first_restrided()) follow_strides();

  graph_.ready_order.restart();
  ++observations_.prepared;
  iteration_ = make_iteration(observations_.begun + 1);
  phase_ = Phase::kPrepared;
  membership_.prepared(/*outputs_are_watched=*/false);
  for (Bucket& bucket : bound_.buckets) bucket.restart();
  if (graph_.used) graph_.used->restart();
  observations_.iteration_begins(iteration_->iteration);
  const std::shared_ptr<IterationState> agreeing = iteration_;
  agree_on_plan(*agreeing);
}

void Reducer::check_parameters() const {
  if (const auto detached = hooks_->first_detached(table_.replicas())) {
    TORCH_CHECK(false, "Reducer: ", table_.name_of(detached->parameter),
                " was moved or cast after the reducer was made, so that its "
                "gradient is not seen.\nMove the module first, then wrap it.");
  }
  if (const auto resized = table_.first_resized()) {
    TORCH_CHECK(false, "Reducer: ", table_.describe_resized(*resized),
                ".\nResize parameters first, then wrap the module.");
  }
  if (!options_.gradients_as_bucket_views) return;
  for (size_t r = 0; r < table_.num_replicas(); ++r) {
    for (size_t i = 0; i < table_.size(); ++i) {
      keep_out_of_buckets({.replica = r, .parameter = i});
    }
  }
}

// A gradient that the user put where it is must not lie in the place of another
// one, which travels while this one is still accumulated.
void Reducer::keep_out_of_buckets(VariableIndex variable) const {
  at::Tensor& gradient = table_[variable].mutable_grad();
  if (!gradient.defined() || gradient.layout() != at::kStrided) return;
  const auto [bucket, slot] = bound_.plan.locate(variable.parameter);
  if (bound_.buckets[bucket].is_view_in(variable.replica, slot, gradient)) {
    return;
  }
  if (bound_.memory.contains(gradient)) gradient = gradient.clone();
}

UnusedPrediction Reducer::predict_unused(
    const std::vector<at::Tensor>& outputs) {
  if (graph_.unused_search) {
    const ProfilerRange searching(observations_.names.search,
                                  at::RecordScope::FUNCTION);
    return graph_.unused_search->predict(outputs);
  }
  UnusedPrediction prediction;
  if (!graph_.hook_counts) return prediction;
  if (!graph_.hook_counts->is_learning()) {
    prediction.unused = graph_.hook_counts->silent();
    prediction.none_reached =
        prediction.unused.size() == table_.num_variables();
  } else if (!hooks_->are_removed()) {
    // No more than this: reentrant checkpoints hide what they use.
    prediction.none_reached =
        GraphSearch(hooks_->accumulators()).unreached(outputs).size() ==
        table_.num_variables();
  }
  return prediction;
}

// The outputs of any forward since the last iteration are this one's.
void Reducer::on_output_reached(Preparation preparation) try {
  const std::lock_guard<std::mutex> lock(mutex_);
  const int backward_id = running_backward_id();
  membership_.output_reached(preparation, backward_id);
  if (is_between(phase_) || membership_.is_finished(preparation)) return;
  if (is_ending(phase_)) return;
  observations_.timeline.backward_begins();
  enter_backward(backward_id);
  try {
    if (begins_at_outputs()) begin_reduction();
    accept_early_gradients(backward_id);
  } catch (...) {
    failed(std::current_exception());
    throw;
  }
} catch (...) {
  observations_.note_error();
  throw;
}

void Reducer::stop_watching_gradients() {
  const std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK_VALUE(
      !options_.find_unused_parameters,
      "Reducer::stop_watching_gradients: find_unused_parameters must be false, "
      "it is true: parameters are found in the graph by the accumulators that "
      "the reducer watches.\nSet static_graph instead.");
  TORCH_CHECK(!has_begun(phase_), "Reducer::stop_watching_gradients: ",
              describe(occasion(observations_.begun)),
              " is being reduced.\nCall it before the backward or after it.");
  hooks_->remove();
}

void Reducer::set_manual_finalization(bool required) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (required == finalizes_manually_) return;
  TORCH_CHECK(is_between(phase_), "Reducer::set_manual_finalization: ",
              describe(occasion(iteration_->iteration)),
              " is prepared or under way; this cannot be called after forward "
              "while a backward is expected.\nCall it before forward, or when "
              "the iteration is over.");
  finalizes_manually_ = required;
}

bool Reducer::must_finalize_after_backward() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return graph_.ready_order.is_observing() ||
         (graph_.hook_counts && graph_.hook_counts->is_learning());
}

void Reducer::finalize_backward() try {
  const std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(finalizes_manually_,
              "Reducer::finalize_backward: manual backward finalization is not "
              "required.\nSet it before forward, or let backward end the "
              "iteration.");
  TORCH_CHECK(phase_ == Phase::kReducing || phase_ == Phase::kSuspended,
              "Reducer::finalize_backward: no gradient reduction requires "
              "finalization.\nCall it once, after a backward outside of "
              "no_sync.");
  TORCH_CHECK(iteration_->order.all_launched(),
              "Reducer::finalize_backward: called before all DDP buckets were "
              "ready: gradients of ",
              table_.name_of(missing_parameters()),
              " are missing.\nCall it when all have come, at the latest after "
              "backward.");
  finalize();
} catch (...) {
  observations_.note_error();
  throw;
}

void Reducer::gradient_ready(size_t parameter, size_t replica) {
  TORCH_CHECK(hooks_->are_removed(),
              "Reducer::gradient_ready: this reducer watches its gradients "
              "itself.\nCall stop_watching_gradients() first.");
  TORCH_CHECK_VALUE(
      parameter < table_.size() && replica < table_.num_replicas(),
      "Reducer::gradient_ready: expected a parameter below ", table_.size(),
      " and a replica below ", table_.num_replicas(), ", got parameter ",
      parameter, " of replica ", replica,
      ".\nGive the index in the list that the reducer was made of.");
  TORCH_CHECK(running_backward_id() >= 0,
              "Reducer::gradient_ready: this thread runs no backward.\nCall it "
              "from a hook that runs in backward.");
  const VariableIndex variable = {.replica = replica, .parameter = parameter};
  on_gradient_ready(variable, table_[variable].grad().defined());
}

void Reducer::on_gradient_ready(VariableIndex variable, bool is_defined) try {
  const std::lock_guard<std::mutex> lock(mutex_);
  const int backward_id = running_backward_id();
  // A function may write to `.grad` itself and return nothing. Source: torch's
  // Reducer, which looks at `.grad` too.
  if (graph_.used && (is_defined || table_[variable].grad().defined())) {
    graph_.used->mark(table_.number_of(variable));
  }
  if (is_between(phase_)) {
    if (const auto finished = membership_.passed_by(backward_id)) {
      TORCH_CHECK(false, describe_late_gradient(table_, variable.parameter,
                                                occasion(*finished)));
    }
    return;  // accumulates locally
  }
  if (is_ending(phase_)) return;
  try {
    if (membership_.is_undecided(phase_)) {
      return accept_early_gradient(variable, is_defined, backward_id);
    }
    enter_backward(backward_id);
    accept_gradient(variable, is_defined);
  } catch (...) {
    failed(std::current_exception());
    throw;
  }
} catch (...) {
  observations_.note_error();
  throw;
}

// Reentrant backwards inside of one change nothing.
void Reducer::enter_backward(int backward_id) {
  if (phase_ == Phase::kPrepared) {
    phase_ = Phase::kReached;
  } else if (phase_ == Phase::kSuspended) {
    phase_ = Phase::kReducing;
  } else {
    return;
  }
  watch_end(backward_id);
}

// Autograd tells of a backward's end only to those who ask during it.
void Reducer::watch_end(int backward_id) {
  const int64_t preparation = iteration_->preparation.number;
  watch_backward_end(
      hooks_,
      [this, preparation, backward_id] {
        on_backward_end(preparation, backward_id);
      },
      [this, preparation] { on_backward_abandoned(preparation); });
}

// What is launched without a gradient goes first: on a rank that leaves out
// all but the last parameters the first gradient may come behind another
// collective of the backward, which its peers meet behind their first buckets.
bool Reducer::begins_at_outputs() const {
  return (skips_unused_buckets() || !iteration_->prediction.unused.empty()) &&
         accumulates_all_gradients();
}

// The backward may come to the prepared outputs later; else the gradient stays
// on this rank.
void Reducer::accept_early_gradient(VariableIndex variable, bool is_defined,
                                    int backward_id) {
  if (iteration_->ready.is_ready(table_.number_of(variable))) {
    // Its bucket is on its way. The iteration should have been over.
    TORCH_CHECK(false, describe_missing_gradients(
                           table_, missing_parameters(),
                           occasion(iteration_->iteration), options_));
  }
  membership_.keep({.variable = variable,
                    .is_defined = is_defined,
                    .backward_id = backward_id});
}

void Reducer::accept_early_gradients(int backward_id) {
  for (const EarlyGradient& early : membership_.take_from(backward_id)) {
    accept_gradient(early.variable, early.is_defined);
  }
}

// Gradients that will not come are ready once backward has begun. Not before:
// forward's outputs may be used for something else.
void Reducer::begin_reduction() {
  if (has_begun(phase_)) return;
  phase_ = Phase::kReducing;
  observations_.begun = iteration_->iteration;
  observations_.timeline.backward_begins();
  iteration_->creates_graph = at::GradMode::is_enabled();
  const std::vector<size_t>& unused = iteration_->prediction.unused;
  if (skips_unused_buckets()) {
    begin_with_peers();
    std::vector<bool> reached(table_.num_variables(), true);
    for (const size_t variable : unused) reached[variable] = false;
    for (size_t i = 0; i < reached.size(); ++i) {
      if (reached[i]) graph_.used->mark(i);
    }
    launch_ready();  // the map
    await_used_map();
  }
  if (hook_.listener) hook_.listener->iteration_begins(/*has_data=*/true);
  if (!hook_.fails_by_network_only &&
      iteration_->iteration - hook_since_ <= kWatchedIterations) {
    iteration_->continuations.emplace();
  }
  mark_unused(unused);
  launch_ready();
}

void Reducer::accept_gradient(VariableIndex variable, bool is_defined) {
  begin_reduction();
  if (is_defined) {
    iteration_->context_gradients.take(table_[variable], bound_.memory);
  }
  const size_t number = table_.number_of(variable);
  if (iteration_->ready.is_ready(number)) refuse_gradient(variable);
  const size_t bucket = bound_.plan.locate(variable.parameter).bucket;
  bound_.buckets[bucket].gradient_produced(variable.replica);
  if (!completes_gradient(variable)) return;
  if (has_gradient(variable)) observations_.timeline.gradient_ready(variable);
  if (mark_ready(variable)) launch_ready();
}

void Reducer::refuse_gradient(VariableIndex variable) const {
  const Occasion now = occasion(iteration_->iteration);
  const size_t number = table_.number_of(variable);
  const size_t parameter = variable.parameter;
  if (graph_.hook_counts && graph_.hook_counts->is_silent(number)) {
    TORCH_CHECK(false, describe_unexpected_gradient(table_, parameter, now));
  }
  TORCH_CHECK(
      false, std::ranges::binary_search(iteration_->prediction.unused, number)
                 ? describe_gradient_of_unused(table_, parameter, now, options_)
                 : describe_second_gradient(table_, parameter, now, options_));
}

// False if more parts of this gradient are to come.
bool Reducer::completes_gradient(VariableIndex variable) {
  return !graph_.hook_counts ||
         graph_.hook_counts->is_last(table_.number_of(variable));
}

// What only the end of a static graph's first backward tells: which gradients
// have come, and which will not come.
void Reducer::learn_graph() {
  if (!graph_.hook_counts || !graph_.hook_counts->is_learning()) return;
  for (const size_t number : graph_.hook_counts->freeze()) {
    const VariableIndex variable = table_.variable(number);
    if (has_gradient(variable)) observations_.timeline.gradient_ready(variable);
    mark_ready(variable);
  }
  mark_unused(graph_.hook_counts->silent());
  launch_ready();
}

void Reducer::mark_unused(std::span<const size_t> variables) {
  for (const size_t number : variables) mark_ready(table_.variable(number));
}

// Undefined gradients may be all that has reached it.
bool Reducer::has_gradient(VariableIndex variable) const {
  return !graph_.used || graph_.used->is_marked(table_.number_of(variable));
}

bool Reducer::mark_ready(VariableIndex variable) {
  const size_t number = table_.number_of(variable);
  if (variable.replica == 0) graph_.ready_order.note(variable.parameter);
  if (graph_.used) graph_.used->note_ready(number);
  iteration_->ready.mark(number);
  if (!iteration_->order.mark(entry_of(variable))) return false;
  pack(bound_.buckets[bound_.plan.locate(variable.parameter).bucket]);
  return true;
}

void Reducer::pack(Bucket& bucket) {
  if (bucket.is_skipped()) return;
  const HookScope scope(iteration_->preparer);
  const ObservedPack packing(observations_, *bucket.bucket());
  bucket.pack();
  if (options_.lazy_bucket_allocation) bucket.list_memory(bound_.memory);
}

bool Reducer::skips_unused_buckets() const {
  return graph_.used && graph_.used->turn() == UsedParameters::Turn::kFirst;
}

// In the iteration that is to come.
bool Reducer::is_used_map_due() const {
  return graph_.unused_search ||
         (graph_.hook_counts && graph_.hook_counts->are_all_learning());
}

// Before anything is launched that depends on it.
void Reducer::await_used_map() {
  const WaitForPeers waiting(*observations_.progress);
  try {
    graph_.used->deliver(/*result=*/{});
  } catch (...) {
    raise(failure_of(*iteration_, ErrorSource::kFuture, *graph_.used),
          iteration_->iteration);
  }
}

// Not ready on some replica, ascending.
std::vector<size_t> Reducer::missing_parameters() const {
  return table_.parameters_of(iteration_->ready.missing());
}

// Where its bucket is in the sequence.
size_t Reducer::entry_of(VariableIndex variable) const {
  return bound_.first_bucket + bound_.plan.locate(variable.parameter).bucket;
}

void Reducer::launch_ready() {
  LaunchOrder& order = iteration_->order;
  if (!order.next()) return;
  const HookScope scope(iteration_->preparer);
  for (; const auto next = order.next(); order.launched()) {
    launch(*iteration_->sequence[*next]);
  }
}

void Reducer::launch(Collective& next) {
  const std::optional<size_t> bucket = next.bucket();
  Launch launch = {.collective = &next, .future = nullptr};
  if (next.is_left_out()) {
    ++observations_.buckets_skipped;
  } else {
    try {
      statuses_.count([&] {
        std::optional<ObservedLaunch> launching;
        if (bucket) launching.emplace(observations_, *bucket);
        const ChainedCollectives::Scope chaining(iteration_->chained);
        launch.future = phase_ == Phase::kShadowing ? next.launch_substitute()
                                                    : next.launch();
      });
    } catch (...) {
      raise(failure_of(*iteration_, ErrorSource::kHook, next),
            iteration_->iteration);
    }
    if (bucket) ++observations_.buckets_launched;
  }
  iteration_->launches.push_back(std::move(launch));
  observations_.launched(iteration_->launches.back());
}

void Reducer::on_backward_end(int64_t preparation, int backward_id) try {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!iteration_ || iteration_->preparation.number != preparation) return;
  if (is_ending(phase_)) return abort_iteration();
  // Gradients were computed, but not of parameters; perhaps there are none to
  // come.
  if (!has_begun(phase_) && !iteration_->prediction.none_reached) {
    phase_ = Phase::kPrepared;
    return;
  }
  const size_t launched_before = iteration_->launches.size();
  try {
    begin_reduction();
    learn_graph();
  } catch (...) {
    failed(std::current_exception());
    abort_iteration();
    throw;
  }
  // Comm hooks that have only now been called may have queued callbacks.
  if (iteration_->launches.size() > launched_before) {
    return watch_end(backward_id);
  }
  phase_ = Phase::kSuspended;
  if (iteration_->order.all_launched()) {
    if (!finalizes_manually_) finalize();
  } else if (options_.one_backward_per_forward) {
    end_unfinished_iteration();
  }
  // Else another backward may bring what is missing. What has been launched is
  // not waited for: a peer may have failed before it did.
} catch (...) {
  observations_.note_error();
  throw;
}

// Nothing is launched any more. The first words are kept.
void Reducer::failed(const std::exception_ptr& error) {
  if (phase_ == Phase::kLost || phase_ == Phase::kResynced) return;
  phase_ = Phase::kFailed;
  if (iteration_->failure.empty()) {
    iteration_->failure = words_of_exception(error);
  }
}

// Whatever phase it was in, it is over on this rank. Null if there is none.
std::shared_ptr<IterationState> Reducer::take_iteration() {
  if (!is_between(phase_)) {
    phase_ = phase_ == Phase::kResynced ? Phase::kAtSyncPoint : Phase::kIdle;
  }
  return std::exchange(iteration_, nullptr);
}

void Reducer::rebuild() {
  const std::vector<size_t>* order = nullptr;
  const WaitForPeers waiting(*observations_.progress);
  try {
    order = &graph_.ready_order.agree(group_);
  } catch (...) {
    abort_group(
        {.kind = StatusKind::kFailed,
         .iteration = observations_.begun,
         .text = status_text(words_of_exception(std::current_exception()))});
    throw_peer_error(
        absl::StrCat("Reducer: agreeing on the order of gradients on rank ",
                     group_->getRank()),
        std::current_exception());
  }
  BucketPlan plan = value_or_throw(
      plan_by_size(table_.specs(), *order, options_.bucket_caps_bytes));
  const bool was_agreed = statuses_.is_agreed(bound_.fingerprint);
  if (plan != bound_.plan) {
    adopt(bind(std::move(plan), hook_));
  }
  // The same order makes the same plan.
  if (was_agreed) statuses_.set_agreed(bound_.fingerprint);
  ++observations_.rebuilds;
  graph_.ready_order.freeze();
}

// Gradients lie in buckets as parameters do in memory.
void Reducer::follow_strides() {
  if (const auto apart = table_.first_unlike_replica_0()) {
    TORCH_CHECK(false, "Reducer: ", table_.name_of(apart->parameter),
                " has strides ", table_[*apart].strides(), " in local replica ",
                apart->replica, " and ", table_[apart->parameter].strides(),
                " in replica 0.\nGive all replicas the same memory format.");
  }
  adopt(bind(bound_.plan, hook_));
  table_.adopt_strides();
}

// Gradients that lie in the old buckets move to the new ones.
void Reducer::adopt(BoundPlan bound) {
  for (Bucket& bucket : bound.buckets) bucket.adopt_gradients();
  bound_ = std::move(bound);
  if (iteration_) {
    // Of the same plan: only a hook is changed while an iteration is prepared.
    iteration_->sequence =
        std::span(bound_.sequence).first(iteration_->sequence.size());
  }
  observe_plan();
}

void Reducer::observe_plan() {
  std::vector<c10::Device> devices;
  devices.reserve(bound_.buckets.size());
  for (const Bucket& bucket : bound_.buckets) {
    devices.push_back(bucket.device());
  }
  observations_.bind(std::move(devices), table_.num_variables());
}

Reducer::BoundPlan Reducer::bind(BucketPlan plan, const HookTraits& hook) {
  UsedParameters* const used = graph_.used ? &*graph_.used : nullptr;
  std::vector<Bucket> buckets;
  buckets.reserve(plan.num_buckets());
  for (size_t b = 0; b < plan.num_buckets(); ++b) {
    buckets.emplace_back(table_, plan, b, hook, options_, used, observations_);
  }
  std::vector<Collective*> sequence;
  if (skips_unused_buckets()) sequence.push_back(used);
  const size_t first_bucket = sequence.size();
  for (Bucket& bucket : buckets) sequence.push_back(&bucket);
  if (used != nullptr && !skips_unused_buckets()) sequence.push_back(used);
  const uint64_t fingerprint = plan_fingerprint(plan, table_, hook);
  MemoryRanges memory;
  for (const Bucket& bucket : buckets) bucket.list_memory(memory);
  return {.plan = std::move(plan),
          .buckets = std::move(buckets),
          .sequence = std::move(sequence),
          .first_bucket = first_bucket,
          .memory = std::move(memory),
          .fingerprint = fingerprint};
}

Occasion Reducer::occasion(int64_t iteration) const {
  return {.iteration = iteration, .rank = group_->getRank()};
}

}  // namespace brigade
