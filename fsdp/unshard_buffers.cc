#include "brigade/fsdp/unshard_buffers.h"

#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <deque>
#include <utility>

namespace brigade {

UnshardBuffers::UnshardBuffers(c10::Device device)
    : device_(device), owner_(side_stream_if_any(device)) {}

UnshardBuffers::~UnshardBuffers() { shrink_to(0); }

Lease UnshardBuffers::acquire(int64_t bytes) {
  if (bytes == 0) return {};
  // Best fit first, otherwise the largest.
  const auto sort_key = [bytes](const Lease& buffer) {
    const int64_t size = buffer.bytes.numel();
    return std::pair(size < bytes, size < bytes ? -size : size);
  };
  const auto best = std::ranges::min_element(free_, {}, sort_key);
  if (best != free_.end()) {
    Lease found = std::move(*best);
    free_.erase(best);
    if (found.bytes.numel() >= bytes) return found;
    deallocate(std::move(found));
  }
  std::optional<c10::StreamGuard> on_owner;
  if (owner_) on_owner.emplace(*owner_);
  Lease allocated = {
      .bytes = at::empty({bytes}, at::TensorOptions(at::kByte).device(device_)),
      .last_use = StreamPoint::now(device_)};
  total_bytes_ += bytes;
  peak_bytes_ = std::max(peak_bytes_, total_bytes_);
  return allocated;
}

void UnshardBuffers::release(Lease lease, const StreamPoint& last_use) {
  if (!lease) return;
  lease.last_use = last_use;
  free_.push_back(std::move(lease));
}

void UnshardBuffers::shrink_to(int64_t bytes) {
  while (total_bytes_ > bytes && !free_.empty()) {
    deallocate(std::move(free_.back()));
    free_.pop_back();
  }
}

std::map<int64_t, size_t> UnshardBuffers::num_free() const {
  std::map<int64_t, size_t> found;
  for (const Lease& buffer : free_) ++found[buffer.bytes.numel()];
  return found;
}

// The allocator reuses the memory on the owner's stream, which waits for the
// last use.
void UnshardBuffers::deallocate(Lease buffer) {
  total_bytes_ -= buffer.bytes.numel();
  if (!owner_) return;
  const c10::StreamGuard on_owner(*owner_);
  buffer.last_use.wait();
}

namespace {

// Acquires and releases buffers as SegmentRun does, without data.
struct Replay {
  void run_segment(const PlannedSegment& segment) {
    using Kind = ScheduleEntry::Kind;
    const Schedule& entries = segment.schedule;
    RecordedSchedule recorded = {
        .entries = entries,
        .accumulations = std::vector<uint32_t>(entries.size(), 0)};
    recorded.advance_gathers(segment.rules.greatest_depth());
    std::vector<char> held;
    for (const auto& lease : unsharded) held.push_back(lease ? 1 : 0);
    std::vector<uint32_t> expected(units.size(), 0);
    for (const auto& [kind, unit] : entries) {
      if (kind == Kind::kReduceScatter) expected[unit] = 1;
    }
    SegmentCursor cursor(segment.rules, &recorded, held, expected);
    CursorActions actions = cursor.begin();
    perform(actions);
    for (const auto& parent : segment.rules.parents) {
      if (parent && expected[*parent] > 0) acquire_gradients(*parent);
    }
    const auto need = [&](std::optional<size_t> unit) {
      if (unit) cursor.need({&*unit, 1}, actions);
      perform(actions);
    };
    std::optional<size_t> needed;
    for (const auto& [kind, unit] : entries) {
      // Reduce-scatters recorded after an all-gather have gradients from before
      // its use.
      if (kind == Kind::kAllGather || needed == unit) {
        need(std::exchange(needed, std::nullopt));
      }
      if (kind == Kind::kAllGather) {
        needed = unit;
      } else {
        if (held[unit] != 0 && unsharded[unit]) need(unit);
        acquire_gradients(unit);
        cursor.accumulated(unit, actions);
        perform(actions);
      }
    }
    need(needed);
    cursor.finish(actions);
    perform(actions);
    while (!reducing.empty()) end_oldest_reduction();
    for (size_t unit = 0; unit < units.size(); ++unit) {
      if (segment.stays[unit] == 0) reshard(unit);
    }
  }

  void perform(CursorActions& actions) {
    for (const auto& [kind, unit] : std::exchange(actions, {})) {
      if (kind == CursorAction::Kind::kAllGather) {
        if (!unsharded[unit]) {
          unsharded[unit] = memory.acquire(units[unit].unsharded);
        }
      } else if (kind == CursorAction::Kind::kReduceScatter) {
        acquire_gradients(unit);
        if (gradients[unit]) {
          reducing.push_back(std::exchange(gradients[unit], {}));
        }
      } else {
        reshard(unit);
      }
    }
  }

  void acquire_gradients(size_t unit) {
    if (gradients[unit] || units[unit].gradients == 0) return;
    while (reducing.size() >= max_reducing) end_oldest_reduction();
    gradients[unit] = memory.acquire(units[unit].gradients);
    num_for_gradients =
        std::max(num_for_gradients,
                 reducing.size() + static_cast<size_t>(std::ranges::count_if(
                                       gradients, &Lease::operator bool)));
  }

  void end_oldest_reduction() {
    memory.release(std::move(reducing.front()));
    reducing.pop_front();
  }

  void reshard(size_t unit) {
    if (!unsharded[unit]) return;
    memory.release(*std::exchange(unsharded[unit], std::nullopt));
  }

  const std::span<const UnitBytes> units;
  const size_t max_reducing;
  UnshardBuffers memory{at::kMeta};
  std::vector<std::optional<Lease>> unsharded =
      std::vector<std::optional<Lease>>(units.size());
  std::vector<Lease> gradients = std::vector<Lease>(units.size());
  std::deque<Lease> reducing = {};
  size_t num_for_gradients = 0;  // peak
};

}  // namespace

BufferPlan plan_buffers(std::span<const PlannedSegment> step,
                        std::span<const UnitBytes> units, size_t max_reducing) {
  Replay replay = {.units = units, .max_reducing = max_reducing};
  int64_t bytes = 0;
  do {
    bytes = replay.memory.total_bytes();
    for (const PlannedSegment& segment : step) replay.run_segment(segment);
    for (size_t unit = 0; unit < units.size(); ++unit) replay.reshard(unit);
  } while (replay.memory.total_bytes() > bytes);
  return {.num_buffers = replay.memory.num_free(),
          .num_for_gradients = replay.num_for_gradients,
          .bytes = bytes};
}

}  // namespace brigade
