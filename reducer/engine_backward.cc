// The calls of a backward: gradients become ready, collectives are launched.

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <memory>
#include <optional>

#include "brigade/hooks/backward_end.h"
#include "brigade/reducer/engine.h"
#include "brigade/reducer/launching.h"

namespace brigade {

// The outputs of any forward since the last iteration are this one's.
void Engine::on_output_reached(Preparation preparation) try {
  const std::lock_guard<std::mutex> lock(mutex_);
  const int backward_id = running_backward_id();
  membership_.output_reached(preparation, backward_id);
  if (is_between(phase_) || membership_.is_finished(preparation)) {
    return;
  }
  if (is_ending(phase_)) return;
  observations_.timeline.backward_begins();
  enter_backward(backward_id);
  try {
    // What is launched without a gradient goes first: on a rank that leaves out
    // all but the last parameters the first gradient may come behind another
    // collective of the backward, which its peers meet behind their first
    // units.
    if (policy_.begins_at_outputs() && accumulates_all_gradients()) {
      begin_reduction();
    }
    for (const EarlyGradient& early : membership_.take_from(backward_id)) {
      accept_gradient(early.variable, early.is_defined);
    }
  } catch (...) {
    failed(std::current_exception());
    throw;
  }
} catch (...) {
  observations_.note_error();
  throw;
}

void Engine::on_local_output_reached() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const int id = running_backward_id();
  if (!membership_.local_output_reached(id)) return;
  const auto ended = [this, id] {
    const std::lock_guard<std::mutex> lock_at_end(mutex_);
    membership_.local_backward_ended(id);
  };
  watch_backward_end(hooks_, ended, ended);
}

void Engine::gradient_ready(VariableIndex variable, bool is_defined) try {
  const std::lock_guard<std::mutex> lock(mutex_);
  const int backward_id = running_backward_id();
  if (is_between(phase_)) {
    policy_.on_local_gradient(variable, is_defined);
    if (const auto finished = membership_.passed_by(backward_id)) {
      TORCH_CHECK(false, policy_.describe_late(variable, occasion(*finished)));
    }
    return;
  }
  if (is_ending(phase_)) {
    return policy_.on_local_gradient(variable, is_defined);
  }
  try {
    if (membership_.is_undecided(phase_, backward_id)) {
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
void Engine::enter_backward(int backward_id) {
  if (phase_ == Phase::kPrepared) {
    phase_ = Phase::kReached;
    peers_.backward_begins();
  } else if (phase_ == Phase::kSuspended) {
    phase_ = Phase::kReducing;
  } else {
    return;
  }
  watch_end(backward_id);
}

// Autograd tells of a backward's end only to those who ask during it.
void Engine::watch_end(int backward_id) {
  const int64_t preparation = iteration_->preparation.number;
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
  policy_.on_local_gradient(variable, is_defined);
  const Iteration& iteration = *iteration_;
  if (iteration.is_ready[policy_.table().number_of(variable)]) {
    // Its unit is on its way. The iteration should have been over.
    TORCH_CHECK(false, policy_.describe_missing(missing(iteration),
                                                iteration.occasion));
  }
  membership_.keep({.variable = variable,
                    .is_defined = is_defined,
                    .backward_id = backward_id});
}

// Gradients that will not come are ready once backward has begun. Not before:
// forward's outputs may be used for something else.
void Engine::begin_reduction() {
  if (has_begun(phase_)) return;
  Iteration& iteration = *iteration_;
  phase_ = Phase::kReducing;
  observations_.counts.begun = iteration.number;
  observations_.timeline.backward_begins();
  iteration.creates_graph = at::GradMode::is_enabled();
  if (policy_.skips_unused_buckets()) begin_together();
  if (!policy_.hook_traits().fails_by_network_only &&
      iteration.number <= watches_continuations_until_) {
    iteration.continuations.emplace();
  }
  mark_at_begin();
  launch_ready();
}

void Engine::begin_together() {
  throw_if_apart(compare(*iteration_, agreement_.begin_status()));
  iteration_->has_begun_together = true;
}

// What a policy knows when a backward begins: the gradients that will not come.
void Engine::mark_at_begin() {
  const bool is_shadow = iteration_->is_shadow;
  policy_.mark_used_at_begin(is_shadow);
  // Before anything is launched that depends on the map.
  if (policy_.skips_unused_buckets()) deliver_used_map();
  policy_.on_backward_begins(
      is_shadow, [this](size_t variable, Slot slot) { mark(variable, slot); });
}

// The sum of the used parameters, which is launched first.
void Engine::deliver_used_map() {
  launch_ready();
  const WaitForPeers waiting(*observations_.progress);
  Collective& map = *iteration_->launches.front().collective;
  try {
    map.deliver(/*result=*/{});  // which waits
  } catch (...) {
    raise(failure_of(*iteration_, ErrorSource::kFuture, map),
          iteration_->number);
  }
}

void Engine::mark(size_t variable, Slot slot) {
  if (slot.has_gradient) {
    observations_.timeline.gradient_ready(policy_.table().variable(variable));
  }
  iteration_->is_ready[variable] = true;
  mark_and_pack(*iteration_, slot.entry, observations_);
}

void Engine::launch_ready() {
  if (const auto failure =
          brigade::launch_ready(*iteration_, peers_, observations_)) {
    raise(*failure, iteration_->number);
  }
}

void Engine::accept_gradient(VariableIndex variable, bool is_defined) {
  begin_reduction();
  std::vector<char>& is_ready = iteration_->is_ready;
  const size_t number = policy_.table().number_of(variable);
  if (is_ready[number]) {
    policy_.refuse(variable, iteration_->occasion);
  }
  const std::optional<Slot> slot = policy_.on_gradient(variable, is_defined);
  if (!slot) return;
  if (slot->has_gradient) {
    observations_.timeline.gradient_ready(variable);
  }
  is_ready[number] = true;
  if (mark_and_pack(*iteration_, slot->entry, observations_)) launch_ready();
}

void Engine::on_backward_end(int64_t preparation, int backward_id) try {
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::shared_ptr<Iteration> iteration = iteration_;
  if (!iteration || iteration->preparation.number != preparation) return;
  if (is_ending(phase_)) return abort_iteration();
  // Gradients were computed, but not of parameters; perhaps there are none to
  // come.
  if (!has_begun(phase_) && !policy_.may_end_without_gradients()) {
    phase_ = Phase::kPrepared;
    return;
  }
  const size_t launched_before = iteration->launches.size();
  try {
    begin_reduction();
    policy_.on_backward_ends(
        [this](size_t variable, Slot slot) { mark(variable, slot); });
    launch_ready();
  } catch (...) {
    failed(std::current_exception());
    abort_iteration();
    throw;
  }
  // Comm hooks that have only now been called may have queued callbacks.
  if (iteration->launches.size() > launched_before) {
    return watch_end(backward_id);
  }
  phase_ = Phase::kSuspended;
  if (iteration->order.all_launched()) {
    if (!finalizes_manually_) finish();
  } else if (policy_.options().one_backward_per_forward) {
    end_unfinished_iteration();
  }
  // Else another backward may bring what is missing. What has been launched is
  // not waited for: a peer may have failed before it did.
} catch (...) {
  observations_.note_error();
  throw;
}

void Engine::on_backward_abandoned(int64_t preparation) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (iteration_ && iteration_->preparation.number == preparation) {
    abort_iteration();
  }
}

}  // namespace brigade
