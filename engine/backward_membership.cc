#include "brigade/engine/backward_membership.h"

#include <utility>

namespace brigade {

void BackwardMembership::prepared(bool outputs_are_watched) {
  outputs_ = outputs_are_watched ? Outputs::kWatched : Outputs::kUnwatched;
  early_.clear();
}

void BackwardMembership::note_local_forward() {
  if (outputs_ == Outputs::kWatched) outputs_ = Outputs::kRequired;
}

std::vector<EarlyGradient> BackwardMembership::take_from(int backward_id) {
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

std::optional<int64_t> BackwardMembership::passed_by(int backward_id) const {
  if (backward_id != reached_by_ || !is_finished(reached_) ||
      reached_.number == last_repeatable_) {
    return std::nullopt;
  }
  return reached_.iteration;
}

}  // namespace brigade
