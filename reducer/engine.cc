// The calls of an engine's owner around a backward and between iterations.

#include "brigade/reducer/engine.h"

#include <c10/util/Exception.h>

#include <functional>
#include <stdexcept>
#include <utility>

#include "absl/strings/str_cat.h"
#include "brigade/comm/errors/message_of.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/hooks/backward_end.h"
#include "brigade/hooks/output_watch.h"

namespace brigade {
namespace {

// Of a user's hook, to see whether its continuations launch collectives.
constexpr int64_t kWatchedIterations = 5;

}  // namespace

Engine::Engine(DataParallelPolicy& policy)
    : hooks_(std::make_shared<GradientHooks>(
          policy.table().replicas(),
          [this](VariableIndex variable, bool is_defined) {
            gradient_ready(variable, is_defined);
          })),
      policy_(policy),
      peers_(policy.group(), policy.options().control_channel),
      agreement_(policy_, peers_, observations_),
      watches_continuations_until_(kWatchedIterations) {
  adopt_sequence();
  peers_.compare_others(!policy.hook_traits().fails_by_network_only);
}

void Engine::connect() {
  const std::lock_guard<std::mutex> lock(mutex_);
  connect_ranks();
  peers_.set_agreed(policy_.fingerprint());
}

void Engine::connect_ranks() {
  peers_.connect();
  if (!policy_.options().control_channel) return;
  observations_.watch_stalls(policy_.group(), peers_.store_prefix(),
                             {.engine = "Reducer", .unit = "bucket"},
                             [this] { return describe_progress(); });
}

// ---- An iteration.

void Engine::prepare(std::span<const at::Tensor> outputs) try {
  const std::lock_guard<std::mutex> lock(mutex_);
  require_no_running_backward();
  end_unfinished_iteration();
  if (!policy_.expects_gradients()) {
    take_iteration();
    return;
  }
  start_iteration();
  policy_.on_prepared(outputs);
  membership_.prepared(watch_outputs(
      outputs, hooks_, [this, preparation = iteration_->preparation] {
        on_output_reached(preparation);
      }));
  observations_.timeline.prepared(iteration_->number);
} catch (...) {
  observations_.note_error();
  throw;
}

void Engine::start_iteration() {
  take_iteration();
  peers_.require_open();
  agreement_.confirm_due_ends();
  policy_.check_variables();
  replan_if_due();
  if (policy_.before_iteration()) adopt_sequence();

  ++observations_.counts.prepared;
  iteration_ = make_iteration(observations_.counts.begun + 1);
  phase_ = Phase::kPrepared;
  membership_.prepared(/*outputs_are_watched=*/false);
  observations_.iteration_begins(iteration_->number);
  const std::shared_ptr<Iteration> agreeing = iteration_;
  agree_on_sequence(*agreeing);
}

// As by a checkpoint around what is wrapped, which computes forward again.
void Engine::require_no_running_backward() const {
  const bool is_inside =
      phase_ == Phase::kReducing && running_backward_id() >= 0;
  TORCH_CHECK(!is_inside,
              "Reducer: expected a forward outside of the backward of ",
              describe(iteration_->occasion),
              ", found one inside of it, which is to be reduced as well.\n"
              "Checkpoint inside of what is wrapped, not around it; or call it "
              "there under no_sync().");
}

// An iteration that has begun and is not over will get no more gradients.
void Engine::end_unfinished_iteration() {
  if (!has_begun(phase_)) return;
  // A backward whose end has not been told has thrown, on another thread.
  if (phase_ != Phase::kSuspended) return abort_iteration();
  Iteration& iteration = *iteration_;
  TORCH_CHECK(
      !finalizes_manually_ || !iteration.order.all_launched(),
      "Expected to have finalized the prior backward pass, but that of ",
      describe(iteration.occasion),
      " was not.\nCall finalize_backward() once after each backward "
      "that is reduced.");
  iteration.failure =
      policy_.describe_missing(missing(iteration), iteration.occasion);
  const std::string text = iteration.failure;
  abort_iteration();
  TORCH_CHECK(false, text);
}

void Engine::end_iteration() try {
  const std::lock_guard<std::mutex> lock(mutex_);
  end_unfinished_iteration();
} catch (...) {
  observations_.note_error();
  throw;
}

void Engine::note_local_forward(std::span<const at::Tensor> outputs) {
  const std::lock_guard<std::mutex> lock(mutex_);
  membership_.note_local_forward();
  watch_outputs(outputs, hooks_, [this] { on_local_output_reached(); });
}

void Engine::shadow() try {
  const std::lock_guard<std::mutex> lock(mutex_);
  end_unfinished_iteration();
  start_iteration();
  phase_ = Phase::kReducing;
  observations_.counts.begun = iteration_->number;
  peers_.backward_begins();
  try {
    if (policy_.skips_unused_buckets()) begin_together();
    iteration_->is_shadow = true;
    mark_at_begin();
    iteration_->order.mark_all();
    launch_ready();
  } catch (...) {
    failed(std::current_exception());
    abort_iteration();
    throw;
  }
  finish();
} catch (...) {
  observations_.note_error();
  throw;
}

void Engine::set_manual_finalization(bool required) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (required == finalizes_manually_) return;
  TORCH_CHECK(is_between(phase_), "Reducer::set_manual_finalization: ",
              describe(iteration_->occasion),
              " is prepared or under way; this cannot be called after forward "
              "while a backward is expected.\nCall it before forward, or when "
              "the iteration is over.");
  finalizes_manually_ = required;
}

void Engine::finalize() try {
  const std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(finalizes_manually_,
              "Reducer::finalize_backward: manual backward finalization is not "
              "required.\nSet it before forward, or let backward end the "
              "iteration.");
  TORCH_CHECK(phase_ == Phase::kReducing || phase_ == Phase::kSuspended,
              "Reducer::finalize_backward: no gradient reduction requires "
              "finalization.\nCall it once, after a backward outside of "
              "no_sync.");
  TORCH_CHECK(
      iteration_->order.all_launched(),
      "Reducer::finalize_backward: called before all DDP buckets were ready: "
      "gradients of ",
      policy_.name_of(missing(*iteration_)),
      " are missing.\nCall it when all have come, at the latest after "
      "backward.");
  finish();
} catch (...) {
  observations_.note_error();
  throw;
}

// ---- Between iterations: ranks meet, and the sequence changes.

void Engine::await_statuses() try {
  const std::lock_guard<std::mutex> lock(mutex_);
  agreement_.confirm_ends();
  if (agreement_.late_failure().empty()) return;
  throw_peer_error(
      "Reducer",
      std::make_exception_ptr(std::runtime_error(agreement_.late_failure())));
} catch (...) {
  observations_.note_error();
  throw;
}

void Engine::meet_peers(std::string_view deed) try {
  const std::lock_guard<std::mutex> lock(mutex_);
  come_together(deed);
} catch (...) {
  observations_.note_error();
  throw;
}

// Peers may be in an iteration that this rank has not begun.
void Engine::come_together(std::string_view deed) {
  end_unfinished_iteration();
  peers_.require_open();
  if (agreement_.runs_ahead()) return agreement_.confirm_due_ends();
  end_together(*make_iteration(observations_.counts.begun),
               {.kind = StatusKind::kAsk,
                .fingerprint = std::hash<std::string_view>()(deed),
                .text = status_text(deed)});
}

void Engine::call_before_forward(std::string_view doing,
                                 const std::function<void()>& collective) try {
  const std::lock_guard<std::mutex> lock(mutex_);
  come_together("came to a forward");
  call_between_iterations(doing, collective);
} catch (...) {
  observations_.note_error();
  throw;
}

bool Engine::replan() try {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (has_begun(phase_)) return false;
  // What was learnt counts when its end is confirmed.
  if (policy_.is_learning()) agreement_.confirm_ends();
  return replan_if_due();
} catch (...) {
  observations_.note_error();
  throw;
}

bool Engine::replan_if_due() {
  const bool was_agreed = peers_.is_agreed(policy_.fingerprint());
  const Replanned replanned = policy_.replan(
      [this](std::string_view doing, const std::function<void()>& collective) {
        call_between_iterations(doing, collective);
      });
  if (replanned == Replanned::kOtherSequence) {
    adopt_sequence();
    if (was_agreed) peers_.set_agreed(policy_.fingerprint());
  }
  return replanned != Replanned::kNotDue;
}

void Engine::change_sequence(std::string_view caller,
                             const std::function<bool()>& change) try {
  const std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(!has_begun(phase_), caller, ": ",
              describe(occasion(observations_.counts.begun)),
              " is being reduced.\nCall it before the backward or after it.");
  // All ranks change it, whatever each of them is still to hear.
  std::exception_ptr refuted;
  try {
    agreement_.confirm_ends();
  } catch (...) {
    refuted = std::current_exception();
  }
  if (change()) adopt_sequence();
  peers_.compare_others(!policy_.hook_traits().fails_by_network_only);
  watches_continuations_until_ =
      observations_.counts.begun + kWatchedIterations;
  // Later ranks may be in different places.
  if (peers_.is_connected()) {
    agree_on_sequence(*make_iteration(observations_.counts.begun + 1));
  }
  if (refuted) std::rethrow_exception(refuted);
} catch (...) {
  observations_.note_error();
  throw;
}

void Engine::call_between_iterations(std::string_view doing,
                                     const std::function<void()>& collective) {
  const WaitForPeers waiting(*observations_.progress);
  try {
    collective();
  } catch (...) {
    peers_.close(message_of(std::current_exception()));
    throw_peer_error(absl::StrCat("Reducer: ", std::string(doing), " on rank ",
                                  policy_.group()->getRank()),
                     std::current_exception());
  }
}

// One that has begun goes on, with entries that wait for the same.
void Engine::adopt_sequence() {
  const std::span<Collective* const> sequence = policy_.sequence();
  if (iteration_) {
    iteration_->sequence = sequence;
    if (!has_begun(phase_)) iteration_->order = launch_order_of(sequence);
  }
  std::vector<c10::Device> devices;
  devices.reserve(sequence.size());
  for (const Collective* collective : sequence) {
    if (collective->unit()) devices.push_back(collective->device());
  }
  observations_.bind(std::move(devices), policy_.table().num_variables());
}

std::shared_ptr<Iteration> Engine::make_iteration(int64_t number) const {
  return std::make_shared<Iteration>(
      Preparation{.number = observations_.counts.prepared, .iteration = number},
      policy_.group()->getRank(), policy_.sequence(),
      policy_.table().num_variables());
}

std::shared_ptr<Iteration> Engine::take_iteration() {
  phase_ = Phase::kIdle;
  return std::exchange(iteration_, nullptr);
}

Occasion Engine::occasion(int64_t iteration) const {
  return {.iteration = iteration, .rank = policy_.group()->getRank()};
}

void Engine::stop_watching_gradients(std::string_view caller) {
  const std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(!has_begun(phase_), caller, ": ",
              describe(occasion(observations_.counts.begun)),
              " is being reduced.\nCall it before the backward or after it.");
  hooks_->remove();
}

// ---- A group that is lost, and what can be observed.

bool Engine::can_continue() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return !peers_.is_closed();
}

void Engine::abort_group() {
  const std::lock_guard<std::mutex> lock(mutex_);
  peers_.leave(
      {.kind = StatusKind::kFailed,
       .iteration = observations_.counts.begun,
       .text = status_text("A collective beside the iteration failed.")});
}

std::vector<size_t> Engine::missing_gradients() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!has_begun(phase_)) return {};
  return missing(*iteration_);
}

ReducerStatistics Engine::statistics() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const ReducerStatistics& of_policy = policy_.statistics();
  ReducerStatistics statistics = observations_.counts;
  statistics.bytes_packed = of_policy.bytes_packed;
  statistics.bytes_delivered = of_policy.bytes_delivered;
  statistics.rebuilds = of_policy.rebuilds;
  statistics.graph_searches = of_policy.graph_searches;
  return statistics;
}

void Engine::forward_begins() {
  const std::lock_guard<std::mutex> lock(mutex_);
  observations_.timeline.forward_begins(observations_.counts.begun + 1);
}

Timeline Engine::timeline() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return observations_.timeline.last();
}

void Engine::set_timeline_sample_rate(int64_t sample_rate) {
  TORCH_CHECK_VALUE(
      sample_rate >= 0,
      "Reducer: the timeline's sample rate must be at least 0, got ",
      sample_rate,
      ".\nGive the number of iterations between samples, or 0 for no "
      "timeline.");
  const std::lock_guard<std::mutex> lock(mutex_);
  observations_.timeline.set_sample_rate(sample_rate);
}

void Engine::set_stall_report_after(std::chrono::milliseconds time) {
  TORCH_CHECK_VALUE(
      time.count() >= 0,
      "Reducer::set_stall_report_after: expected at least 0, got ",
      time.count(),
      " ms.\nGive the time after which a stall is reported, or 0 "
      "for never.");
  observations_.stall_report_after = time;
  if (observations_.stall_watch) {
    observations_.stall_watch->set_report_after(time);
  }
}

void Engine::set_stall_handler(
    std::function<void(const std::string&)> handler) {
  if (observations_.stall_watch) {
    observations_.stall_watch->set_handler(std::move(handler));
  } else {
    observations_.stall_handler = std::move(handler);
  }
}

std::optional<ReductionError> Engine::last_error() const {
  return observations_.last_error();
}

// Called on another thread; never waits for the lock, which an engine that
// waits for its peers holds.
std::string Engine::describe_progress() const {
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  const Progress& progress = *observations_.progress;
  if (!lock.owns_lock()) {
    return absl::StrCat("has launched ", progress.launched.load(), " of ",
                        progress.num_units.load(), " buckets of iteration ",
                        progress.iteration.load(),
                        progress.is_waiting() ? " and waits for its peers"
                                              : " and is inside a hook");
  }
  if (is_between(phase_)) {
    return absl::StrCat("has prepared nothing since iteration ",
                        observations_.counts.begun);
  }
  if (!has_begun(phase_)) {
    return absl::StrCat("has prepared iteration ", iteration_->number,
                        ", whose backward has reached no parameter");
  }
  std::string words =
      absl::StrCat("has launched ", num_units(iteration_->launches), " of ",
                   num_units(iteration_->sequence), " buckets of iteration ",
                   iteration_->number);
  const std::vector<size_t> unready = missing(*iteration_);
  if (!unready.empty()) {
    absl::StrAppend(&words, " and waits for the gradients of ",
                    policy_.name_of(unready));
  }
  return words;
}

}  // namespace brigade
