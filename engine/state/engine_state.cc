#include "brigade/engine/state/engine_state.h"

#include <algorithm>
#include <exception>
#include <utility>
#include <vector>

#include "brigade/comm/close_group.h"
#include "brigade/comm/errors/message_of.h"

namespace brigade {

std::shared_ptr<Iteration> EngineState::take_iteration() {
  phase = Phase::kIdle;
  return std::exchange(iteration, nullptr);
}

UnconfirmedEnd EngineState::take_oldest_end() {
  UnconfirmedEnd oldest = std::move(unconfirmed_ends.front());
  unconfirmed_ends.pop_front();
  return oldest;
}

void EngineState::failed(const std::exception_ptr& error) {
  if (phase == Phase::kOver) return;
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
  observations.bind(std::move(devices), num_variables());
}

void EngineState::close_group(std::string_view reason) {
  peers.note_closed(reason.empty() ? "A collective failed." : reason);
  brigade::close_group(*group);
}

void EngineState::leave_group(RankStatus last) {
  peers.set_cannot_continue();
  try {
    peers.send(last, /*ends_iteration=*/true);
  } catch (const std::exception&) {
    // The channel has failed as well, which peers notice by themselves.
  }
  close_group(words_of(last.text));
}

bool EngineState::runs_ahead() const {
  return std::ranges::none_of(policy.sequence(), [](const Collective* entry) {
    return entry->device().is_cpu();
  });
}

}  // namespace brigade
