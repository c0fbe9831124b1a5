#include "brigade/reducer/backward_membership.h"

#include <algorithm>
#include <utility>

namespace brigade {

void BackwardMembership::prepared(bool outputs_are_watched) {
  outputs_ = outputs_are_watched ? Outputs::kWatched : Outputs::kUnwatched;
  early_.clear();
}

void BackwardMembership::note_local_forward() {
  if (outputs_ == Outputs::kWatched) outputs_ = Outputs::kRequired;
}

bool BackwardMembership::local_output_reached(int backward_id) {
  if (std::ranges::count(local_backwards_, backward_id) > 0) return false;
  local_backwards_.push_back(backward_id);
  return true;
}

void BackwardMembership::local_backward_ended(int backward_id) {
  std::erase(local_backwards_, backward_id);
}

bool BackwardMembership::is_local(int backward_id) const {
  return std::ranges::any_of(local_backwards_,
                             [&](int id) { return id <= backward_id; });
}

bool BackwardMembership::is_undecided(int backward_id) const {
  return outputs_ == Outputs::kRequired || is_local(backward_id);
}

std::vector<EarlyGradient> BackwardMembership::take_early_gradients(
    int backward_id) {
  std::vector<EarlyGradient> taken = std::exchange(early_, {});
  std::erase_if(taken, [&](const EarlyGradient& gradient) {
    return gradient.backward_id < backward_id;
  });
  return taken;
}

void BackwardMembership::mark_finished(Preparation preparation,
                                       bool may_be_repeated) {
  last_finished_ = preparation.number;
  if (may_be_repeated) last_repeatable_ = preparation.number;
}

void BackwardMembership::output_reached(Preparation preparation,
                                        int backward_id) {
  reached_ = preparation;
  reached_by_ = backward_id;
}

std::optional<int64_t> BackwardMembership::finished_iteration_of(
    int backward_id) const {
  if (backward_id != reached_by_ || !is_finished(reached_) ||
      reached_.number == last_repeatable_) {
    return std::nullopt;
  }
  return reached_.iteration;
}

}  // namespace brigade
