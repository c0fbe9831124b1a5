// The life of an engine, what its owner calls around a backward, and what it
// tells of itself. Between iterations: engine_between.cc; by a backward:
// engine_backward.cc.

#include "brigade/engine/engine.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "brigade/engine/agreement.h"
#include "brigade/engine/describe_progress.h"
#include "brigade/engine/launching/launching.h"
#include "brigade/engine/running_iteration.h"
#include "brigade/hooks/backward_end.h"
#include "brigade/hooks/output_watch.h"

namespace brigade {

Engine::Engine(c10::intrusive_ptr<c10d::ProcessGroup> group,
               std::span<const std::vector<at::Tensor>> replicas,
               ReductionPolicy& policy, EngineOptions options)
    : hooks_(std::make_shared<GradientHooks>(replicas, EngineListener(*this))),
      state_{.group = std::move(group),
             .policy = policy,
             .options = std::move(options),
             .num_replicas = replicas.size(),
             .num_parameters = replicas.front().size(),
             .describe_progress = [this] { return describe_progress(); },
             .peers =
                 PeerStatus(state_.group, state_.options.has_control_channel)} {
  state_.adopt_sequence();
  state_.peers.compare_others(!policy.hook_traits().fails_by_network_only);
}

Engine::~Engine() {
  state_.observations.stall_watch = nullptr;  // asks this object

  // A backward that failed may tell of it a little late, on another thread.
  const std::weak_ptr<GradientHooks> callbacks = hooks_;
  hooks_ = nullptr;
  while (!callbacks.expired()) std::this_thread::yield();

  const std::shared_ptr<Iteration>& iteration = state_.iteration;
  if (!iteration) return;
  if (std::ranges::any_of(iteration->launches, is_pending)) {
    keep_until_done(state_.policy.let_go(), *iteration);
    return;
  }
  // A device may be busy with what is complete on the host: the current stream
  // is behind it before the memory goes.
  for (const Launch& launch : iteration->launches) {
    if (launch.future) launch.future->wait();
  }
}

void Engine::connect() {
  const std::lock_guard<std::mutex> lock(mutex_);
  brigade::connect(state_);
  state_.peers.set_agreed(state_.policy.fingerprint());
}

void Engine::connect_later() { state_.peers.connect_later(); }

void Engine::prepare(std::span<const at::Tensor> outputs) try {
  const std::lock_guard<std::mutex> lock(mutex_);
  require_no_running_backward();
  end_unfinished_iteration();
  if (!state_.policy.expects_gradients()) {
    state_.take_iteration();
    return;
  }
  start_iteration();
  state_.policy.on_prepared(outputs);
  state_.membership.prepared(watch_outputs(
      outputs, hooks_, [this, preparation = state_.iteration->preparation] {
        on_output_reached(preparation);
      }));
  state_.observations.timeline.prepared(state_.iteration->number);
} catch (...) {
  state_.observations.note_error();
  throw;
}

void Engine::start_iteration() {
  state_.take_iteration();
  state_.peers.require_open(state_.options.name);
  confirm_due_ends(state_);
  state_.policy.check_variables();
  replan_if_due();
  if (state_.policy.before_iteration()) state_.adopt_sequence();

  ++state_.observations.prepared;
  state_.iteration = state_.make_iteration(state_.observations.begun + 1);
  state_.phase = Phase::kPrepared;
  state_.membership.prepared(/*outputs_are_watched=*/false);
  state_.observations.iteration_begins(state_.iteration->number);
  const std::shared_ptr<Iteration> agreeing = state_.iteration;
  agree_on_sequence(state_, *agreeing);
}

// As by a checkpoint around what is wrapped, which computes forward again.
void Engine::require_no_running_backward() const {
  const bool is_inside =
      state_.phase == Phase::kReducing && running_backward_id() >= 0;
  TORCH_CHECK(!is_inside, state_.options.name,
              ": expected a forward outside of the backward of ",
              describe(state_.occasion(state_.iteration->number)),
              ", found one inside of it, which is to be reduced as well.\n"
              "Checkpoint inside of what is wrapped, not around it; or call it "
              "there under no_sync().");
}

// An iteration that has begun and is not over will get no more gradients.
void Engine::end_unfinished_iteration() {
  if (!has_begun(state_.phase)) return;
  // A backward whose end has not been told has thrown, on another thread.
  if (state_.phase != Phase::kSuspended) return abort_iteration(state_);
  Iteration& iteration = *state_.iteration;
  TORCH_CHECK(
      !finalizes_manually_ || !iteration.order.all_launched(),
      "Expected to have finalized the prior backward pass, but that of ",
      describe(state_.occasion(iteration.number)),
      " was not.\nCall finalize_backward() once after each backward "
      "that is reduced.");
  iteration.failure = state_.policy.describe_missing(
      iteration.ready.missing(), state_.occasion(iteration.number));
  const std::string text = iteration.failure;
  abort_iteration(state_);
  TORCH_CHECK(false, text);
}

void Engine::end_iteration() try {
  const std::lock_guard<std::mutex> lock(mutex_);
  end_unfinished_iteration();
} catch (...) {
  state_.observations.note_error();
  throw;
}

void Engine::note_local_forward(std::span<const at::Tensor> outputs) {
  const std::lock_guard<std::mutex> lock(mutex_);
  state_.membership.note_local_forward();
  watch_outputs(outputs, hooks_, [this] { on_local_output_reached(); });
}

void Engine::shadow() try {
  const std::lock_guard<std::mutex> lock(mutex_);
  end_unfinished_iteration();
  start_iteration();
  state_.phase = Phase::kReducing;
  state_.observations.begun = state_.iteration->number;
  state_.peers.backward_begins();
  try {
    if (state_.policy.compares_each_iteration()) begin_together(state_);
    RunningIteration iteration(state_);
    state_.iteration->is_shadow = true;
    state_.policy.on_backward_begins(iteration, /*is_shadow=*/true);
    state_.iteration->order.mark_all();
    launch_ready(state_);
  } catch (...) {
    state_.failed(std::current_exception());
    abort_iteration(state_);
    throw;
  }
  finish();
} catch (...) {
  state_.observations.note_error();
  throw;
}

void Engine::set_manual_finalization(bool required) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (required == finalizes_manually_) return;
  TORCH_CHECK(is_between(state_.phase), state_.options.name,
              "::set_manual_finalization: ",
              describe(state_.occasion(state_.iteration->number)),
              " is prepared or under way; this cannot be called after forward "
              "while a backward is expected.\nCall it before forward, or when "
              "the iteration is over.");
  finalizes_manually_ = required;
}

void Engine::finalize() try {
  const std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(finalizes_manually_, state_.options.name,
              "::finalize_backward: manual backward finalization is not "
              "required.\nSet it before forward, or let backward end the "
              "iteration.");
  TORCH_CHECK(
      state_.phase == Phase::kReducing || state_.phase == Phase::kSuspended,
      state_.options.name,
      "::finalize_backward: no gradient reduction requires "
      "finalization.\nCall it once, after a backward outside of "
      "no_sync.");
  TORCH_CHECK(state_.iteration->order.all_launched(), state_.options.name,
              "::finalize_backward: called before all DDP buckets were ready: "
              "gradients of ",
              state_.policy.name_of(state_.iteration->ready.missing()),
              " are missing.\nCall it when all have come, at the latest after "
              "backward.");
  finish();
} catch (...) {
  state_.observations.note_error();
  throw;
}

bool Engine::can_continue() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return !state_.peers.is_closed();
}

void Engine::abort_group() {
  const std::lock_guard<std::mutex> lock(mutex_);
  state_.leave_group(
      {.kind = StatusKind::kFailed,
       .iteration = state_.observations.begun,
       .text = status_text("A collective beside the iteration failed.")});
}

std::vector<size_t> Engine::missing_gradients() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!has_begun(state_.phase)) return {};
  return state_.iteration->ready.missing();
}

EngineStatistics Engine::statistics() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return state_.observations;
}

void Engine::forward_begins() {
  const std::lock_guard<std::mutex> lock(mutex_);
  state_.observations.timeline.forward_begins(state_.observations.begun + 1);
}

Timeline Engine::timeline() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return state_.observations.timeline.last();
}

void Engine::set_timeline_sample_rate(int64_t sample_rate) {
  TORCH_CHECK_VALUE(
      sample_rate >= 0, state_.options.name,
      ": the timeline's sample rate must be at least 0, got ", sample_rate,
      ".\nGive the number of iterations between samples, or 0 for no "
      "timeline.");
  const std::lock_guard<std::mutex> lock(mutex_);
  state_.observations.timeline.set_sample_rate(sample_rate);
}

void Engine::set_stall_report_after(std::chrono::milliseconds time) {
  TORCH_CHECK_VALUE(time.count() >= 0, state_.options.name,
                    "::set_stall_report_after: expected at least 0, got ",
                    time.count(),
                    " ms.\nGive the time after which a stall is reported, or 0 "
                    "for never.");
  state_.observations.stall_report_after = time;
  if (state_.observations.stall_watch) {
    state_.observations.stall_watch->set_report_after(time);
  }
}

void Engine::set_stall_handler(
    std::function<void(const std::string&)> handler) {
  if (state_.observations.stall_watch) {
    state_.observations.stall_watch->set_handler(std::move(handler));
  } else {
    state_.observations.stall_handler = std::move(handler);
  }
}

std::optional<ReductionError> Engine::last_error() const {
  return state_.observations.last_error.get();
}

// Called on another thread; never waits for the lock, which an engine that
// waits for its peers holds.
std::string Engine::describe_progress() const {
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  return lock.owns_lock() ? brigade::describe_progress(state_)
                          : describe_busy_progress(state_);
}

}  // namespace brigade
