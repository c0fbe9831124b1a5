// What a backward calls, and what begins or ends an iteration's reduction.

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <memory>
#include <optional>

#include "brigade/engine/agreement.h"
#include "brigade/engine/delivery.h"
#include "brigade/engine/engine.h"
#include "brigade/engine/launching/hook_scope.h"
#include "brigade/engine/launching/launching.h"
#include "brigade/engine/running_iteration.h"
#include "brigade/hooks/backward_end.h"

namespace brigade {

// The outputs of any forward since the last iteration are this one's.
void Engine::on_output_reached(Preparation preparation) try {
  const std::lock_guard<std::mutex> lock(mutex_);
  const int backward_id = running_backward_id();
  state_.membership.output_reached(preparation, backward_id);
  if (is_between(state_.phase) || state_.membership.is_finished(preparation)) {
    return;
  }
  if (is_ending(state_.phase)) return;
  state_.observations.timeline.backward_begins();
  enter_backward(backward_id);
  try {
    // What is launched without a gradient goes first: on a rank that leaves out
    // all but the last parameters the first gradient may come behind another
    // collective of the backward, which its peers meet behind their first
    // units.
    if (state_.policy.begins_at_outputs() && accumulates_all_gradients()) {
      begin_reduction();
    }
    for (const EarlyGradient& early :
         state_.membership.take_from(backward_id)) {
      accept_gradient(early.variable, early.is_defined);
    }
  } catch (...) {
    state_.failed(std::current_exception());
    throw;
  }
} catch (...) {
  state_.observations.note_error();
  throw;
}

void Engine::on_local_output_reached() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const int id = running_backward_id();
  if (!state_.membership.local_output_reached(id)) return;
  const auto ended = [this, id] {
    const std::lock_guard<std::mutex> lock_at_end(mutex_);
    state_.membership.local_backward_ended(id);
  };
  watch_backward_end(hooks_, ended, ended);
}

void EngineListener::operator()(VariableIndex variable, bool is_defined) const {
  engine_->gradient_ready(variable, is_defined);
}

void Engine::gradient_ready(VariableIndex variable, bool is_defined) try {
  const std::lock_guard<std::mutex> lock(mutex_);
  const int backward_id = running_backward_id();
  if (is_between(state_.phase)) {
    state_.policy.on_local_gradient(variable, is_defined);
    if (const auto finished = state_.membership.passed_by(backward_id)) {
      TORCH_CHECK(false, state_.policy.describe_late(
                             variable, state_.occasion(*finished)));
    }
    return;
  }
  if (is_ending(state_.phase)) {
    return state_.policy.on_local_gradient(variable, is_defined);
  }
  try {
    if (state_.membership.is_undecided(state_.phase, backward_id)) {
      return accept_early_gradient(variable, is_defined, backward_id);
    }
    enter_backward(backward_id);
    accept_gradient(variable, is_defined);
  } catch (...) {
    state_.failed(std::current_exception());
    throw;
  }
} catch (...) {
  state_.observations.note_error();
  throw;
}

// Reentrant backwards inside of one change nothing.
void Engine::enter_backward(int backward_id) {
  if (state_.phase == Phase::kPrepared) {
    state_.phase = Phase::kReached;
    state_.peers.backward_begins();
  } else if (state_.phase == Phase::kSuspended) {
    state_.phase = Phase::kReducing;
  } else {
    return;
  }
  watch_end(backward_id);
}

// Autograd tells of a backward's end only to those who ask during it.
void Engine::watch_end(int backward_id) {
  const int64_t preparation = state_.iteration->preparation.number;
  watch_backward_end(
      hooks_,
      [this, preparation, backward_id] {
        on_backward_end(preparation, backward_id);
      },
      [this, preparation] { on_backward_abandoned(preparation); });
}

// The backward may come to the prepared outputs later; else the gradient stays
// on this rank.
void Engine::accept_early_gradient(VariableIndex variable, bool is_defined,
                                   int backward_id) {
  state_.policy.on_local_gradient(variable, is_defined);
  const Iteration& iteration = *state_.iteration;
  if (iteration.ready.is_ready(state_.number_of(variable))) {
    // Its unit is on its way. The iteration should have been over.
    TORCH_CHECK(false, state_.policy.describe_missing(
                           iteration.ready.missing(),
                           state_.occasion(iteration.number)));
  }
  state_.membership.keep({.variable = variable,
                          .is_defined = is_defined,
                          .backward_id = backward_id});
}

// Gradients that will not come are ready once backward has begun. Not before:
// forward's outputs may be used for something else.
void Engine::begin_reduction() {
  if (has_begun(state_.phase)) return;
  Iteration& iteration = *state_.iteration;
  state_.phase = Phase::kReducing;
  state_.observations.begun = iteration.number;
  state_.observations.timeline.backward_begins();
  iteration.creates_graph = at::GradMode::is_enabled();
  if (state_.policy.compares_each_iteration()) begin_together(state_);
  if (!state_.policy.hook_traits().fails_by_network_only &&
      iteration.number <= state_.watches_continuations_until) {
    iteration.continuations.emplace();
  }
  RunningIteration running(state_);
  state_.policy.on_backward_begins(running, /*is_shadow=*/false);
  launch_ready(state_);
}

void Engine::accept_gradient(VariableIndex variable, bool is_defined) {
  begin_reduction();
  ReadyVariables& ready = state_.iteration->ready;
  const size_t number = state_.number_of(variable);
  if (ready.is_ready(number)) {
    state_.policy.refuse(variable, state_.occasion(state_.iteration->number));
  }
  const std::optional<Slot> slot =
      state_.policy.on_gradient(variable, is_defined);
  if (!slot) return;
  if (slot->has_gradient) {
    state_.observations.timeline.gradient_ready(variable);
  }
  ready.mark(number);
  if (mark_and_pack(state_, slot->entry)) launch_ready(state_);
}

void Engine::on_backward_end(int64_t preparation, int backward_id) try {
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::shared_ptr<Iteration> iteration = state_.iteration;
  if (!iteration || iteration->preparation.number != preparation) return;
  if (is_ending(state_.phase)) return abort_iteration(state_);
  // Gradients were computed, but not of parameters; perhaps there are none to
  // come.
  if (!has_begun(state_.phase) && !state_.policy.may_end_without_gradients()) {
    state_.phase = Phase::kPrepared;
    return;
  }
  const size_t launched_before = iteration->launches.size();
  try {
    begin_reduction();
    RunningIteration running(state_);
    state_.policy.on_backward_ends(running);
    launch_ready(state_);
  } catch (...) {
    state_.failed(std::current_exception());
    abort_iteration(state_);
    throw;
  }
  // Comm hooks that have only now been called may have queued callbacks.
  if (iteration->launches.size() > launched_before) {
    return watch_end(backward_id);
  }
  state_.phase = Phase::kSuspended;
  if (iteration->order.all_launched()) {
    if (!finalizes_manually_) finish();
  } else if (state_.options.one_backward_per_forward) {
    end_unfinished_iteration();
  }
  // Else another backward may bring what is missing. What has been launched is
  // not waited for: a peer may have failed before it did.
} catch (...) {
  state_.observations.note_error();
  throw;
}

void Engine::on_backward_abandoned(int64_t preparation) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (state_.iteration && state_.iteration->preparation.number == preparation) {
    abort_iteration(state_);
  }
}

// All is launched: ranks end the iteration together, and deliver.
void Engine::finish() {
  const std::shared_ptr<Iteration> iteration = state_.take_iteration();
  state_.membership.mark_finished(iteration->preparation,
                                  iteration->creates_graph);
  const ObservedFinalize finalizing(state_.observations);
  const RankStatus end = {
      .kind = StatusKind::kEnd,
      .text = status_text(state_.policy.hook_traits().name)};
  if (may_defer_status(state_, *iteration)) {
    const HookScope scope(iteration->preparer);
    return deliver_unconfirmed(state_, iteration, end);
  }
  end_together(state_, *iteration, end);
  const HookScope scope(iteration->preparer);
  deliver_all(state_, *iteration);
}

}  // namespace brigade
