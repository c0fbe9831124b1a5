#include "brigade/fsdp/gather_schedule.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace brigade {

absl::StatusOr<GatherSchedule> GatherSchedule::create(
    size_t num_units, const GatherScheduleOptions& options) {
  if (num_units == 0) {
    return absl::InvalidArgumentError(
        "a gather schedule needs at least 1 unit, got 0");
  }
  if (options.max_in_flight == 0) {
    return absl::InvalidArgumentError(
        "a gather schedule needs max_in_flight >= 1, got 0; 1 gathers each "
        "unit when it is needed");
  }
  return GatherSchedule(num_units, options);
}

GatherStep GatherSchedule::forward_begins(bool goes_backward) {
  close_forward();
  in_forward_ = true;
  goes_backward_ = goes_backward;
  return predict(last_forward_);
}

GatherStep GatherSchedule::backward_begins() {
  close_forward();
  return predict({to_go_backward_.rbegin(), to_go_backward_.rend()});
}

GatherStep GatherSchedule::end() {
  close_forward();
  to_go_backward_.clear();
  return predict({});
}

GatherStep GatherSchedule::needs(size_t unit) {
  GatherStep step;
  const bool is_next =
      cursor_ < prediction_.size() && prediction_[cursor_] == unit;
  move_cursor(unit);
  if (in_forward_) forward_.push_back(unit);
  if (units_[unit].state == State::kReleased) {
    step.is_mispredicted =
        !is_next && !prediction_.empty() && options_.prefetch_depth > 0;
    num_mispredicted_ += step.is_mispredicted;
    launch(unit, false);
    step.launch.push_back(unit);
  } else {
    no_longer_ahead(unit);
  }
  step.drop = drop_unpredicted();
  const std::vector<size_t> ahead = launch_predicted();
  step.launch.insert(step.launch.end(), ahead.begin(), ahead.end());
  return step;
}

std::vector<size_t> GatherSchedule::gathered(size_t unit) {
  leave_flight(unit);
  return launch_predicted();
}

std::vector<size_t> GatherSchedule::released(size_t unit) {
  leave_flight(unit);
  no_longer_ahead(unit);
  units_[unit].state = State::kReleased;
  return launch_predicted();
}

void GatherSchedule::close_forward() {
  if (in_forward_ && !forward_.empty()) {
    if (goes_backward_) {
      to_go_backward_.insert(to_go_backward_.end(), forward_.begin(),
                             forward_.end());
    }
    last_forward_ = std::exchange(forward_, {});
  }
  in_forward_ = false;
}

GatherStep GatherSchedule::predict(std::vector<size_t> units) {
  prediction_ = std::move(units);
  cursor_ = 0;
  GatherStep step;
  step.drop = drop_unpredicted();
  step.launch = launch_predicted();
  return step;
}

void GatherSchedule::move_cursor(size_t unit) {
  const auto next = prediction_.begin() + static_cast<std::ptrdiff_t>(cursor_);
  const auto found = std::find(next, prediction_.end(), unit);
  if (found == prediction_.end()) return;
  // A unit in use that is needed again, by a recomputation for instance, says
  // nothing of what has been passed over.
  const Unit& known = units_[unit];
  const bool in_use = known.state != State::kReleased && !known.is_ahead;
  if (found != next && in_use) return;
  cursor_ = static_cast<size_t>(found - prediction_.begin()) + 1;
}

// The next `prefetch_depth` different units.
std::vector<size_t> GatherSchedule::next_predicted() const {
  std::vector<size_t> next;
  for (size_t i = cursor_;
       i < prediction_.size() && next.size() < options_.prefetch_depth; ++i) {
    if (std::ranges::find(next, prediction_[i]) == next.end()) {
      next.push_back(prediction_[i]);
    }
  }
  return next;
}

std::vector<size_t> GatherSchedule::drop_unpredicted() {
  const std::vector<size_t> next = next_predicted();
  std::vector<size_t> dropped;
  std::ranges::copy_if(ahead_, std::back_inserter(dropped), [&](size_t unit) {
    return std::ranges::find(next, unit) == next.end();
  });
  return dropped;
}

std::vector<size_t> GatherSchedule::launch_predicted() {
  std::vector<size_t> launched;
  for (const size_t unit : next_predicted()) {
    if (units_[unit].state != State::kReleased) continue;
    if (num_ahead_in_flight_ + 1 >= options_.max_in_flight) break;
    launch(unit, true);
    launched.push_back(unit);
  }
  return launched;
}

void GatherSchedule::launch(size_t unit, bool is_ahead) {
  units_[unit] = {.state = State::kInFlight, .is_ahead = is_ahead};
  if (!is_ahead) return;
  ahead_.push_back(unit);
  ++num_ahead_in_flight_;
}

void GatherSchedule::leave_flight(size_t unit) {
  Unit& known = units_[unit];
  if (known.state != State::kInFlight) return;
  known.state = State::kHeld;
  num_ahead_in_flight_ -= known.is_ahead;
}

void GatherSchedule::no_longer_ahead(size_t unit) {
  Unit& known = units_[unit];
  if (!known.is_ahead) return;
  num_ahead_in_flight_ -= known.state == State::kInFlight;
  known.is_ahead = false;
  std::erase(ahead_, unit);
}

}  // namespace brigade
