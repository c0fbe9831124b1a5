#include "brigade/fsdp/schedule/memory_plan.h"

#include <algorithm>
#include <compare>
#include <deque>
#include <numeric>
#include <ranges>
#include <utility>

#include "brigade/fsdp/schedule/buffer_plan.h"
#include "brigade/fsdp/schedule/gather_schedule.h"

namespace brigade {
namespace {

constexpr int64_t kOpen = -1;  // the end of a use that has not ended

// Goes through a step, and records it.
class Step {
 public:
  Step(std::span<const PlannedUnit> units, std::span<const UnitCall> calls,
       size_t prefetch_depth, size_t max_reducing)
      : units_(units),
        turns_(turns_of(calls)),
        backward_order_(backward_order_of(calls)),
        max_reducing_(max_reducing),
        schedule_(units.size(), prefetch_depth),
        gathered_(units.size()),
        slices_(units.size()),
        open_gradients_(units.size()) {
    for (const UnitCall& call : calls) order_.push_back(call.unit);
  }

  void run() {
    forward();
    if (std::ranges::any_of(units_, is_trained)) backward();
    ++now_;
    for (size_t unit = 0; unit < units_.size(); ++unit) {
      const UnitSettings& settings = units_[unit].settings;
      if (settings.reshards_after_backward && !settings.spans_passes) continue;
      for (const size_t use : gathered_[unit]) is_there_from_the_begin(use);
    }
    for (const std::vector<size_t>& slices : slices_) {  // without a backward
      for (const size_t use : slices) is_there_from_the_begin(use);
    }
    for (RecordedUse& recorded : uses_) {
      if (recorded.interval.end == kOpen) recorded.interval.end = now_;
    }
  }

  const std::vector<RecordedUse>& uses() const { return uses_; }

 private:
  // Of one unit: memory that reductions keep.
  using Reducing = std::vector<size_t>;

  static bool is_trained(const PlannedUnit& unit) {
    return std::ranges::any_of(unit.segments, [](const PlannedSegment& one) {
      return one.gradient_bytes.has_value();
    });
  }

  void forward() {
    launch(schedule_.begin({order_.begin(), order_.end()}), Purpose::kForward);
    for (const auto& [unit, begins] : turns_) {
      const UnitSettings& settings = units_[unit].settings;
      ++now_;
      if (begins) {
        launch(schedule_.needs(unit, settings.forward_prefetch).launch,
               Purpose::kForward);
      } else if (settings.reshards_after_forward && !settings.spans_passes) {
        keep_slices(unit);
        release(unit);
      }
    }
    for (const size_t unit : order_) {
      const UnitSettings& settings = units_[unit].settings;
      if (settings.reshards_after_forward && settings.spans_passes) {
        keep_slices(unit);
        release(unit);
      }
    }
  }

  void backward() {
    const size_t first = has_outermost() ? 1 : 0;
    std::vector<size_t> expected;
    for (const size_t unit : backward_order_) {
      if (!units_[unit].is_reached) {
        drop_slices(unit);
      } else if (!schedule_.is_claimed(unit) &&
                 units_[unit].settings.gathers_in_backward) {
        expected.push_back(unit);
      }
    }
    ++now_;
    launch(schedule_.begin(std::move(expected)), Purpose::kBackward);
    if (has_outermost()) {
      // As if they were there in forward too: else what is free there, and
      // perhaps much larger, would be taken from all that follows.
      begin_gradients_of_whole_step(order_.front());
    }
    for (size_t place = first; place < order_.size(); ++place) {
      if (units_[order_[place]].settings.spans_passes) {
        begin_gradients_of_whole_step(order_[place]);
      }
    }
    for (const auto& [unit, begins] : std::views::reverse(turns_)) {
      if (has_outermost() && unit == order_.front()) continue;
      const UnitSettings& settings = units_[unit].settings;
      ++now_;
      if (!begins) {
        if (settings.gathers_in_backward && units_[unit].is_reached) {
          launch(schedule_.needs(unit, settings.backward_prefetch).launch,
                 Purpose::kBackward);
        }
        ++now_;
        if (!settings.spans_passes) take_gradients(unit);
        continue;
      }
      if (settings.spans_passes) continue;  // whole, and taking gradients
      reduce_gradients(unit);
      if (settings.reshards_after_backward && units_[unit].is_reached) {
        release(unit);
      }
    }
  }

  bool has_outermost() const {
    return !order_.empty() &&
           !units_[order_.front()].settings.reshards_after_forward;
  }

  void launch(const std::vector<size_t>& units, Purpose pass) {
    for (const size_t unit : units) {
      for (size_t i = 0; i < units_[unit].segments.size(); ++i) {
        const auto& bytes = units_[unit].segments[i].whole_bytes;
        if (!bytes) continue;
        if (units_[unit].settings.keeps_storage) {  // taken once, for ever
          if (pass != Purpose::kForward) continue;
          is_there_from_the_begin(begin_use({unit, i, pass}, *bytes));
        } else {
          gathered_[unit].push_back(begin_use({unit, i, pass}, *bytes));
        }
      }
      if (pass == Purpose::kBackward) drop_slices(unit);
    }
  }

  // Made while the unit is whole, and read while it is made whole again.
  void keep_slices(size_t unit) {
    for (size_t i = 0; i < units_[unit].segments.size(); ++i) {
      const auto& bytes = units_[unit].segments[i].slice_bytes;
      if (!bytes) continue;
      slices_[unit].push_back(begin_use({unit, i, Purpose::kSlice}, *bytes));
    }
    ++now_;
  }

  void drop_slices(size_t unit) {
    if (slices_[unit].empty()) return;
    ++now_;
    for (const size_t use : std::exchange(slices_[unit], {})) end_use(use);
  }

  void release(size_t unit) {
    for (const size_t use : std::exchange(gathered_[unit], {})) end_use(use);
    schedule_.released(unit);
  }

  // What is to be lent again was launched before any of the last reductions,
  // in whatever order those of one unit are.
  void take_gradients(size_t unit) {
    if (!is_trained(units_[unit])) return;
    if (units_[unit].adds_up_gradients) {
      return begin_gradients_of_whole_step(unit);
    }
    while (!reducing_.empty() &&
           num_reducing_ - reducing_.front().size() >= max_reducing_ - 1) {
      for (const size_t use : reducing_.front()) end_use(use);
      num_reducing_ -= reducing_.front().size();
      reducing_.pop_front();
    }
    open_gradients_[unit] = begin_gradients(unit);
  }

  void reduce_gradients(size_t unit) {
    if (open_gradients_[unit].empty()) return;
    reducing_.push_back(std::exchange(open_gradients_[unit], {}));
    num_reducing_ += reducing_.back().size();
  }

  Reducing begin_gradients(size_t unit) {
    Reducing reducing;
    for (size_t i = 0; i < units_[unit].segments.size(); ++i) {
      const auto& bytes = units_[unit].segments[i].gradient_bytes;
      if (!bytes) continue;
      reducing.push_back(begin_use({unit, i, Purpose::kGradients}, *bytes));
    }
    return reducing;
  }

  void begin_gradients_of_whole_step(size_t unit) {
    for (const size_t use : begin_gradients(unit)) is_there_from_the_begin(use);
  }

  size_t begin_use(const MemoryUse& use, int64_t bytes) {
    uses_.push_back(
        {.use = use,
         .interval = {.begin = now_, .end = kOpen, .bytes = bytes}});
    return uses_.size() - 1;
  }
  void end_use(size_t use) { uses_[use].interval.end = now_; }
  void is_there_from_the_begin(size_t use) { uses_[use].interval.begin = 0; }

  const std::span<const PlannedUnit> units_;
  const std::vector<UnitTurn> turns_;  // of forward
  const std::vector<size_t> backward_order_;
  std::vector<size_t> order_;  // of units, as their calls begin
  const size_t max_reducing_;

  GatherSchedule schedule_;
  std::vector<RecordedUse> uses_;
  std::vector<std::vector<size_t>> gathered_;  // uses of it now, by unit
  std::vector<std::vector<size_t>> slices_;    // uses of them now, by unit
  std::vector<Reducing> open_gradients_;       // by unit, in its backward
  std::deque<Reducing> reducing_;
  size_t num_reducing_ = 0;  // uses in it
  int64_t now_ = 0;
};

}  // namespace

absl::StatusOr<MemoryPlan> MemoryPlan::create(
    std::span<const PlannedUnit> units, std::span<const UnitCall> calls,
    size_t prefetch_depth, size_t max_reducing) {
  Step step(units, calls, prefetch_depth, max_reducing);
  step.run();
  return create(step.uses());
}

absl::StatusOr<MemoryPlan> MemoryPlan::create(
    std::span<const RecordedUse> step) {
  std::vector<BufferUse> intervals;
  intervals.reserve(step.size());
  for (const RecordedUse& use : step) intervals.push_back(use.interval);
  const absl::StatusOr<BufferPlan> buffers = BufferPlan::create(intervals);
  if (!buffers.ok()) return buffers.status();
  MemoryPlan plan;
  for (size_t i = 0; i < step.size(); ++i) {
    plan.buffers_[step[i].use].push_back(buffers->buffer_of(i));
  }
  plan.buffer_bytes_ = buffers->buffer_bytes();
  return plan;
}

std::span<const size_t> MemoryPlan::of(const MemoryUse& use) const {
  const std::vector<size_t>* const found = buffers_.find(use);
  return found == nullptr ? std::span<const size_t>() : *found;
}

std::optional<size_t> MemoryPlan::buffer_for(const MemoryUse& use,
                                             size_t time) const {
  const std::span<const size_t> buffers = of(use);
  if (buffers.empty()) return std::nullopt;
  return buffers[std::min(time, buffers.size() - 1)];
}

bool MemoryPlan::suffices_for(std::span<const RecordedUse> step) const {
  struct Event {
    int64_t time;
    bool begins;  // what ends at its time is free
    size_t use;

    auto operator<=>(const Event&) const = default;
  };
  std::vector<Event> events;
  for (size_t i = 0; i < step.size(); ++i) {
    events.push_back({step[i].interval.begin, /*begins=*/true, i});
    events.push_back({step[i].interval.end, /*begins=*/false, i});
  }
  std::ranges::sort(events);
  std::vector<char> is_lent(buffer_bytes_.size());
  std::vector<size_t> lent(step.size());  // by use
  ByUse<size_t> num_begun;
  for (const Event& event : events) {
    const auto& [use, interval] = step[event.use];
    if (!event.begins) {
      is_lent[lent[event.use]] = 0;
      continue;
    }
    std::optional<size_t> found = buffer_for(use, num_begun[use]++);
    const auto fits = [&](size_t buffer) {
      return is_lent[buffer] == 0 && buffer_bytes_[buffer] >= interval.bytes;
    };
    if (!found || !fits(*found)) {
      found.reset();
      for (size_t buffer = 0; buffer < buffer_bytes_.size(); ++buffer) {
        if (!fits(buffer)) continue;
        if (!found || buffer_bytes_[buffer] < buffer_bytes_[*found]) {
          found = buffer;
        }
      }
    }
    if (!found) return false;
    lent[event.use] = *found;
    is_lent[*found] = 1;
  }
  return true;
}

int64_t MemoryPlan::total_bytes() const {
  return std::accumulate(buffer_bytes_.begin(), buffer_bytes_.end(),
                         int64_t{0});
}

}  // namespace brigade
