// What is called between iterations: where ranks meet, and where the sequence
// changes.

#include <c10/util/Exception.h>

#include <exception>
#include <functional>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "brigade/comm/errors/peer_error.h"
#include "brigade/engine/agreement.h"
#include "brigade/engine/engine.h"

namespace brigade {

void Engine::await_statuses() try {
  const std::lock_guard<std::mutex> lock(mutex_);
  confirm_ends(state_);
  if (state_.late_failure.empty()) return;
  throw_peer_error(
      state_.options.name,
      std::make_exception_ptr(std::runtime_error(state_.late_failure)));
} catch (...) {
  state_.observations.note_error();
  throw;
}

void Engine::meet_peers(std::string_view deed) try {
  const std::lock_guard<std::mutex> lock(mutex_);
  come_together(deed);
} catch (...) {
  state_.observations.note_error();
  throw;
}

// Peers may be in an iteration that this rank has not begun.
void Engine::come_together(std::string_view deed) {
  end_unfinished_iteration();
  state_.peers.require_open(state_.options.name);
  if (state_.runs_ahead()) return confirm_due_ends(state_);
  end_together(state_, *state_.make_iteration(state_.observations.begun),
               {.kind = StatusKind::kAsk,
                .fingerprint = std::hash<std::string_view>()(deed),
                .text = status_text(deed)});
}

void Engine::call_before_forward(std::string_view doing,
                                 const std::function<void()>& collective) try {
  const std::lock_guard<std::mutex> lock(mutex_);
  come_together("came to a forward");
  call_between_iterations(state_, doing, collective);
} catch (...) {
  state_.observations.note_error();
  throw;
}

bool Engine::replan() try {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (has_begun(state_.phase)) return false;
  // What was learnt counts when its end is confirmed.
  if (state_.policy.is_learning()) confirm_ends(state_);
  return replan_if_due();
} catch (...) {
  state_.observations.note_error();
  throw;
}

bool Engine::replan_if_due() {
  const bool was_agreed = state_.peers.is_agreed(state_.policy.fingerprint());
  const Replanned replanned = state_.policy.replan(
      [this](std::string_view doing, const std::function<void()>& collective) {
        call_between_iterations(state_, doing, collective);
      });
  if (replanned == Replanned::kOtherSequence) {
    state_.adopt_sequence();
    if (was_agreed) state_.peers.set_agreed(state_.policy.fingerprint());
  }
  return replanned != Replanned::kNotDue;
}

void Engine::change_sequence(std::string_view caller,
                             const std::function<bool()>& change) try {
  const std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(!has_begun(state_.phase), caller, ": ",
              describe(state_.occasion(state_.observations.begun)),
              " is being reduced.\nCall it before the backward or after it.");
  // All ranks change it, whatever each of them is still to hear.
  std::exception_ptr refuted;
  try {
    confirm_ends(state_);
  } catch (...) {
    refuted = std::current_exception();
  }
  if (change()) state_.adopt_sequence();
  state_.peers.compare_others(
      !state_.policy.hook_traits().fails_by_network_only);
  state_.watches_continuations_until =
      state_.observations.begun + kWatchedIterations;
  // Later ranks may be in different places.
  if (state_.peers.is_connected()) {
    agree_on_sequence(state_,
                      *state_.make_iteration(state_.observations.begun + 1));
  }
  if (refuted) std::rethrow_exception(refuted);
} catch (...) {
  state_.observations.note_error();
  throw;
}

void Engine::stop_watching_gradients(std::string_view caller) {
  const std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(!has_begun(state_.phase), caller, ": ",
              describe(state_.occasion(state_.observations.begun)),
              " is being reduced.\nCall it before the backward or after it.");
  hooks_->remove();
}

}  // namespace brigade
