#include "brigade/engine/state/engine_state.h"

#include <utility>
#include <vector>

#include "brigade/comm/close_group.h"
#include "brigade/comm/errors/message_of.h"

namespace brigade {

std::shared_ptr<Iteration> EngineState::take_iteration() {
  if (!is_between(phase)) {
    phase = phase == Phase::kResynced ? Phase::kAtSyncPoint : Phase::kIdle;
  }
  return std::exchange(iteration, nullptr);
}

UnconfirmedEnd EngineState::take_oldest_end() {
  UnconfirmedEnd oldest = std::move(unconfirmed_ends.front());
  unconfirmed_ends.pop_front();
  return oldest;
}

void EngineState::leave_sync_point() {
  if (phase == Phase::kAtSyncPoint) phase = Phase::kIdle;
}

void EngineState::failed(const std::exception_ptr& error) {
  if (phase == Phase::kLost || phase == Phase::kResynced) return;
  phase = Phase::kFailed;
  if (iteration->failure.empty()) iteration->failure = message_of(error);
}

void EngineState::adopt_sequence() {
  const std::span<Collective* const> sequence = policy.sequence();
  if (iteration) {
    iteration->sequence = sequence;
    // One that has begun goes on, with entries that wait for the same.
    if (!has_begun(phase)) iteration->order = launch_order_of(sequence);
  }
  std::vector<c10::Device> devices;
  devices.reserve(sequence.size());
  for (const Collective* collective : sequence) {
    if (collective->unit()) devices.push_back(collective->device());
  }
  observations.bind(std::move(devices), num_variables(), policy.unit_word());
}

void EngineState::close_groups() {
  peers.note_group_aborted();
  for (const auto& group : groups) close_group(*group);
}

void EngineState::abort_group(const RankStatus& last_words) {
  peers.tell_of_abort(last_words);
  close_groups();
}

}  // namespace brigade
