#include "brigade/fsdp/schedule/gather_schedule.h"

#include <algorithm>
#include <utility>

namespace brigade {

std::vector<size_t> GatherSchedule::begin(std::vector<size_t> expected) {
  expected_ = std::move(expected);
  num_launched_ = 0;
  num_needed_ = 0;
  record_.clear();
  std::vector<size_t> launched;
  launch_ahead(launched, depth_);
  return launched;
}

GatherStep GatherSchedule::needs(size_t unit, std::span<const size_t> ahead) {
  State& state = states_[unit];
  if (state == State::kClaimed) return {};
  record_.push_back(unit);
  GatherStep step;
  const size_t place = place_of(unit);
  if (place < expected_.size()) {
    num_needed_ = std::max(num_needed_, place + 1);
    step.launch = launch_up_to(num_needed_);
    state = State::kClaimed;
    launch_ahead(step.launch,
                 ahead.empty() ? num_needed_ + depth_ : end_behind(ahead));
  } else if (state == State::kReleased) {
    step.launch = rest();
    step.is_late = true;
    filled_by_[unit] = expected_.size();
    ++num_late_;
  }
  state = State::kClaimed;
  return step;
}

size_t GatherSchedule::place_of(size_t unit) const {
  const size_t from =
      states_[unit] == State::kUnclaimed ? num_needed_ : num_launched_;
  const auto next =
      std::find(expected_.begin() + static_cast<std::ptrdiff_t>(from),
                expected_.end(), unit);
  return static_cast<size_t>(next - expected_.begin());
}

// One that is there may have been passed over.
size_t GatherSchedule::awaited_by(size_t unit) const {
  return states_[unit] == State::kReleased ? place_of(unit) : filled_by_[unit];
}

std::vector<size_t> GatherSchedule::left_out_by(size_t unit) const {
  const size_t place = place_of(unit);
  if (states_[unit] == State::kClaimed || place == expected_.size()) return {};
  const auto begin = expected_.begin();
  return {begin + static_cast<std::ptrdiff_t>(std::min(num_needed_, place)),
          begin + static_cast<std::ptrdiff_t>(place)};
}

std::vector<size_t> GatherSchedule::launch_through(size_t unit) {
  const size_t place = place_of(unit);
  return place < expected_.size() ? launch_up_to(place + 1)
                                  : std::vector<size_t>();
}

std::vector<size_t> GatherSchedule::next() {
  return launch_up_to(num_launched_ + 1);
}

std::vector<size_t> GatherSchedule::unclaimed_before(size_t place) const {
  std::vector<size_t> units = unclaimed();
  std::erase_if(units, [&](size_t unit) { return filled_by_[unit] >= place; });
  std::ranges::sort(units, {}, [&](size_t unit) { return filled_by_[unit]; });
  return units;
}

std::vector<size_t> GatherSchedule::rest() {
  return launch_up_to(expected_.size());
}

std::vector<size_t> GatherSchedule::unclaimed() const {
  std::vector<size_t> units;
  for (size_t unit = 0; unit < states_.size(); ++unit) {
    if (states_[unit] == State::kUnclaimed) units.push_back(unit);
  }
  return units;
}

// The place behind the next expected need of each.
size_t GatherSchedule::end_behind(std::span<const size_t> ahead) const {
  size_t end = num_needed_;
  const auto next =
      expected_.begin() + static_cast<std::ptrdiff_t>(num_needed_);
  for (const size_t unit : ahead) {
    const auto found = std::find(next, expected_.end(), unit);
    if (found == expected_.end()) continue;
    end = std::max(end,
                   static_cast<size_t>(found - expected_.begin()) + size_t{1});
  }
  return end;
}

// A unit that is there is gathered again when it has been released.
void GatherSchedule::launch_ahead(std::vector<size_t>& launched, size_t end) {
  end = std::min(end, expected_.size());
  while (num_launched_ < end &&
         states_[expected_[num_launched_]] == State::kReleased) {
    launched.push_back(launch_up_to(num_launched_ + 1).front());
    ++num_ahead_;
  }
}

// Those of units that are there already are launched all the same.
std::vector<size_t> GatherSchedule::launch_up_to(size_t end) {
  std::vector<size_t> launched;
  for (end = std::min(end, expected_.size()); num_launched_ < end;
       ++num_launched_) {
    const size_t unit = expected_[num_launched_];
    launched.push_back(unit);
    if (states_[unit] != State::kReleased) continue;
    states_[unit] = State::kUnclaimed;
    filled_by_[unit] = num_launched_;
  }
  return launched;
}

}  // namespace brigade
