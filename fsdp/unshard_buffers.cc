#include "brigade/fsdp/unshard_buffers.h"

#include <algorithm>
#include <deque>
#include <optional>
#include <utility>

namespace brigade {

namespace {

constexpr size_t kNone = static_cast<size_t>(-1);
constexpr int kMostSteps = 8;

}  // namespace

BufferList::BufferList(std::vector<int64_t> bytes)
    : num_planned_(bytes.size()) {
  for (const int64_t of_buffer : bytes)
    buffers_.push_back({.bytes = of_buffer});
  peak_bytes_ = total_bytes();
}

size_t BufferList::acquire(int64_t bytes) {
  const size_t fit = smallest_fit(bytes);
  if (fit != kNone) return take(fit);
  ++num_extra_;
  return take(add(bytes));
}

size_t BufferList::acquire_or_grow(int64_t bytes) {
  size_t buffer = smallest_fit(bytes);
  if (buffer == kNone) {
    for (size_t i = 0; i < buffers_.size(); ++i) {
      if (buffers_[i].is_free &&
          (buffer == kNone || buffers_[i].bytes > buffers_[buffer].bytes)) {
        buffer = i;
      }
    }
    if (buffer == kNone) {
      buffer = add(bytes);
      num_planned_ = buffers_.size();
    }
    buffers_[buffer].bytes = bytes;
    peak_bytes_ = std::max(peak_bytes_, total_bytes());
  }
  return take(buffer);
}

void BufferList::release(size_t buffer) {
  buffers_[buffer].is_free = true;
  buffers_[buffer].free_since = ++time_;
}

void BufferList::drop_extra() {
  while (buffers_.size() > num_planned_ && buffers_.back().is_free) {
    buffers_.pop_back();
  }
  for (size_t i = num_planned_; i < buffers_.size(); ++i) {
    if (buffers_[i].is_free) buffers_[i].bytes = 0;
  }
}

std::vector<int64_t> BufferList::planned_bytes() const {
  std::vector<int64_t> bytes;
  for (size_t i = 0; i < num_planned_; ++i) bytes.push_back(buffers_[i].bytes);
  return bytes;
}

int64_t BufferList::total_bytes() const {
  int64_t total = 0;
  for (const Buffer& buffer : buffers_) total += buffer.bytes;
  return total;
}

size_t BufferList::take(size_t buffer) {
  buffers_[buffer].is_free = false;
  return buffer;
}

size_t BufferList::smallest_fit(int64_t bytes) const {
  size_t best = kNone;
  for (size_t i = 0; i < buffers_.size(); ++i) {
    if (!buffers_[i].is_free || buffers_[i].bytes < bytes) continue;
    if (best == kNone ||
        std::pair(buffers_[i].bytes, buffers_[i].free_since) <
            std::pair(buffers_[best].bytes, buffers_[best].free_since)) {
      best = i;
    }
  }
  return best;
}

size_t BufferList::add(int64_t bytes) {
  buffers_.push_back({.bytes = bytes});
  peak_bytes_ = std::max(peak_bytes_, total_bytes());
  return buffers_.size() - 1;
}

UnshardPlan plan_buffers(std::span<const SegmentPlan> step,
                         const std::vector<UnitBytes>& sizes,
                         size_t max_reducing) {
  BufferList list;
  std::vector<size_t> unsharded(sizes.size(), kNone);
  std::vector<size_t> gradients(sizes.size(), kNone);
  std::deque<size_t> reducing;  // buffers, the oldest first
  std::vector<char> held(sizes.size(), 0);

  const auto carry_out = [&](const CursorActions& actions) {
    for (const auto& [kind, unit] : actions) {
      switch (kind) {
        case CursorAction::Kind::kAllGather:
          if (unsharded[unit] == kNone) {
            unsharded[unit] = list.acquire_or_grow(sizes[unit].unsharded);
          }
          break;
        case CursorAction::Kind::kReduceScatter:
          if (gradients[unit] == kNone) break;  // of zeros: a buffer at once
          reducing.push_back(std::exchange(gradients[unit], kNone));
          break;
        case CursorAction::Kind::kRelease:
          list.release(std::exchange(unsharded[unit], kNone));
          break;
      }
    }
  };
  const auto run = [&](const RecordedSchedule& recorded,
                       const UnitRules& rules) {
    RecordedSchedule schedule = recorded;  // each unit gets one gradient
    std::ranges::fill(schedule.accumulations, 0);
    SegmentCursor cursor(rules, &schedule, held, [&] {
      std::vector<uint32_t> expected(sizes.size(), 0);
      for (const ScheduleEntry& entry : schedule.entries) {
        if (entry.kind == ScheduleEntry::Kind::kReduceScatter) {
          expected[entry.unit] = 1;
        }
      }
      return expected;
    }());
    carry_out(cursor.begin());
    // A unit's gradients come after its last all-gather, before the next use.
    std::vector<char> has_gradient(sizes.size(), 0);
    const auto accumulate = [&](size_t unit) {
      if (has_gradient[unit] != 0 || sizes[unit].gradients == 0) return;
      has_gradient[unit] = 1;
      if (reducing.size() >= max_reducing) {
        list.release(reducing.front());
        reducing.pop_front();
      }
      gradients[unit] = list.acquire_or_grow(sizes[unit].gradients);
      CursorActions actions;
      cursor.accumulated(unit, actions);
      carry_out(actions);
    };
    for (const ScheduleEntry& entry : schedule.entries) {
      if (entry.kind == ScheduleEntry::Kind::kAllGather) {
        CursorActions actions;
        const size_t unit = entry.unit;
        cursor.need({&unit, 1}, actions);
        carry_out(actions);
        const bool is_trained =
            std::ranges::find(schedule.entries,
                              ScheduleEntry{ScheduleEntry::Kind::kReduceScatter,
                                            unit}) != schedule.entries.end();
        if (is_trained) accumulate(unit);
      } else {
        accumulate(entry.unit);  // of a unit that was unsharded before
      }
    }
    CursorActions actions;
    cursor.finish(actions);
    carry_out(actions);
    held = cursor.held();
    while (!reducing.empty()) {
      list.release(reducing.front());
      reducing.pop_front();
    }
  };
  // A step takes other buffers where they have grown, and what stays unsharded
  // is there when the next one begins.
  for (int i = 0; i < kMostSteps; ++i) {
    const std::vector<int64_t> before = list.planned_bytes();
    for (const SegmentPlan& segment : step) {
      run(segment.schedule, segment.rules);
    }
    if (list.planned_bytes() == before) break;
  }
  return {.buffer_bytes = list.planned_bytes(),
          .peak_bytes = list.peak_bytes()};
}

}  // namespace brigade
