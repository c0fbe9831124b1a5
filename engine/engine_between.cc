// What is called between iterations: where ranks meet, and where the sequence
// changes.

#include <c10/util/Exception.h>

#include <exception>
#include <utility>

#include "brigade/engine/agreement/rank_agreement.h"
#include "brigade/engine/agreement/unconfirmed_ends.h"
#include "brigade/engine/engine.h"
#include "brigade/engine/launching/launching_apart.h"

namespace brigade {

void Engine::synchronize(SyncPoint place) try {
  const std::lock_guard<std::mutex> lock(mutex_);
  come_to_sync_point(place);
  confirm_ends(state_);
  state_.leave_sync_point();
} catch (...) {
  state_.observations.note_error();
  throw;
}

// Peers may be in an iteration that this rank has not begun.
void Engine::come_to_sync_point(SyncPoint place) {
  end_unfinished_iteration();
  if (state_.phase == Phase::kAtSyncPoint) return;
  end_together(state_, *state_.make_iteration(state_.observations.begun),
               {.kind = StatusKind::kIdle,
                .unit = place == SyncPoint::kAfterForward ? 0 : -1});
}

// A rank that failed launches what it launched last, which is to be the same.
bool Engine::may_open_unconfirmed(const Opening& opening) {
  return state_.opening && state_.opening->form() == opening.form() &&
         !opening.keeps_host_waiting() && state_.peers.on(0).tells_openings() &&
         state_.options.defers_status_check.value_or(
             !opening.device().is_cpu());
}

void Engine::open(std::shared_ptr<Opening> opening) try {
  const std::lock_guard<std::mutex> lock(mutex_);
  come_to_sync_point(SyncPoint::kBeforeForward);
  if (may_open_unconfirmed(*opening)) {
    confirm_known_ends(state_);
  } else {
    confirm_ends(state_);
  }
  state_.leave_sync_point();
  state_.opening = std::move(opening);
  call_apart(state_, state_.opening->describe(), [this] {
    state_.peers.on(0).open(state_.opening->form(),
                            [this] { state_.opening->launch(); });
  });
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
        call_apart(state_, doing, collective);
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
