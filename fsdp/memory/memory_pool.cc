#include "brigade/fsdp/memory/memory_pool.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <span>
#include <utility>

#include "brigade/fsdp/streams/sharding_streams.h"

namespace brigade {
int64_t MemoryPool::size_of(const Unplanned& unplanned) {
  return unplanned.buffer.memory.numel();
}

bool MemoryPool::fits(const Unplanned& unplanned, int64_t bytes) {
  return size_of(unplanned) >= bytes;
}

bool MemoryPool::fits(const Planned& planned, int64_t bytes) {
  return planned.is_free && planned.bytes >= bytes;
}

template <typename Buffers>
auto MemoryPool::smallest_fit(Buffers& buffers, int64_t bytes) {
  auto smallest = buffers.end();
  for (auto buffer = buffers.begin(); buffer != buffers.end(); ++buffer) {
    if (!fits(*buffer, bytes)) continue;
    if (smallest == buffers.end() || size_of(*buffer) < size_of(*smallest)) {
      smallest = buffer;
    }
  }
  return smallest;
}

MemoryPool::MemoryPool(c10::Device device)
    : device_(device), owner_(stream_beside_the_program(device)) {}

MemoryPool::~MemoryPool() {
  for (Planned& planned : planned_) give_up(std::move(planned.buffer));
  for (Unplanned& unplanned : free_) give_up(std::move(unplanned.buffer));
}

void MemoryPool::plan(MemoryPlan plan) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (Planned& planned : std::exchange(planned_, {})) {
    TORCH_INTERNAL_ASSERT(planned.is_free, "memory of the plan is lent");
    if (!planned.buffer.memory.defined()) continue;
    planned.buffer.planned.reset();
    free_.push_back({.buffer = std::move(planned.buffer)});
  }
  for (const int64_t bytes : plan.buffer_bytes()) {
    Planned& planned = planned_.emplace_back(Planned{.bytes = bytes});
    const auto same = std::ranges::find(
        free_, bytes, [](const Unplanned& free) { return size_of(free); });
    if (same == free_.end()) continue;
    planned.buffer = std::move(same->buffer);
    free_.erase(same);
  }
  while (!free_.empty()) give_up_largest();
  plan_ = std::move(plan);
}

bool MemoryPool::lends_planned() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return !std::ranges::all_of(planned_, &Planned::is_free);
}

Buffer MemoryPool::acquire(int64_t bytes, std::optional<MemoryUse> use) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Buffer buffer = acquire_memory(bytes, use ? buffer_for(*use) : std::nullopt);
  if (!is_recording_) return buffer;
  if (!buffer.planned) is_as_planned_ = false;
  if (use) buffer.use = record_.begin(*use, bytes);
  return buffer;
}

// That of the last one where a step has more of them.
std::optional<size_t> MemoryPool::buffer_for(const MemoryUse& use) const {
  const std::span<const size_t> buffers = plan_.of(use);
  if (buffers.empty()) return std::nullopt;
  const size_t place = is_recording_ ? record_.num_begun(use) : 0;
  return buffers[std::min(place, buffers.size() - 1)];
}

Buffer MemoryPool::acquire_memory(int64_t bytes,
                                  std::optional<size_t> planned) {
  if (planned && fits(planned_.at(*planned), bytes)) {
    return lend(planned_[*planned]);
  }
  const auto of_plan = smallest_fit(planned_, bytes);
  const auto other = smallest_fit(free_, bytes);
  if (other != free_.end() &&
      (of_plan == planned_.end() || size_of(*other) <= size_of(*of_plan))) {
    Buffer buffer = std::move(other->buffer);
    free_.erase(other);
    return buffer;
  }
  if (of_plan != planned_.end()) return lend(*of_plan);
  if (!free_.empty()) give_up_largest();
  ++num_unplanned_;
  return make(bytes);
}

Buffer MemoryPool::lend(Planned& planned) {
  Buffer buffer = planned.buffer.memory.defined()
                      ? std::exchange(planned.buffer, {})
                      : make(planned.bytes);
  planned.is_free = false;
  buffer.planned = static_cast<size_t>(&planned - planned_.data());
  return buffer;
}

void MemoryPool::give_up_largest() {
  const auto largest = std::ranges::max_element(
      free_, {}, [](const Unplanned& unplanned) { return size_of(unplanned); });
  bytes_ -= size_of(*largest);
  give_up(std::move(largest->buffer));
  free_.erase(largest);
}

void MemoryPool::give_up_unused() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto unused = std::ranges::partition(free_, &Unplanned::was_lent);
  for (Unplanned& unplanned : unused) {
    bytes_ -= size_of(unplanned);
    give_up(std::move(unplanned.buffer));
  }
  free_.erase(unused.begin(), unused.end());
  for (Unplanned& unplanned : free_) unplanned.was_lent = false;
}

Buffer MemoryPool::make(int64_t bytes) {
  const at::NoGradGuard no_grad;
  bytes_ += bytes;
  peak_bytes_ = std::max(peak_bytes_, bytes_);
  ++num_allocations_;
  const ShardingStreams::Scope on_owner(owner_);
  Buffer buffer = {
      .memory = at::empty(
          {bytes}, at::TensorOptions().dtype(at::kByte).device(device_))};
  // What the allocator gives is free for its own stream, no earlier: others
  // may have had it, which that stream has waited for.
  buffer.last_use = StreamPoint::now(device_);
  return buffer;
}

void MemoryPool::release(Buffer buffer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (const auto use = std::exchange(buffer.use, {})) record_.end(*use);
  if (!buffer.planned) {
    free_.push_back({.buffer = std::move(buffer)});
    return;
  }
  Planned& planned = planned_[*buffer.planned];
  planned.buffer = std::move(buffer);
  planned.is_free = true;
}

void MemoryPool::end_use(size_t number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  record_.end(number);
}

void MemoryPool::set_recording(bool value) {
  const std::lock_guard<std::mutex> lock(mutex_);
  is_recording_ = value;
}

bool MemoryPool::is_in_step() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return !record_.is_empty();
}

RecordedStep MemoryPool::end_step() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return {.uses = record_.end_step(),
          .is_as_planned = std::exchange(is_as_planned_, true)};
}

// The allocator lends it to the owner again, at once.
void MemoryPool::give_up(Buffer buffer) {
  const ShardingStreams::Scope on_owner(owner_);
  buffer.last_use.wait();
  buffer.memory.reset();
}

int64_t MemoryPool::bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return bytes_;
}

int64_t MemoryPool::peak_bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return peak_bytes_;
}

int64_t MemoryPool::num_allocations() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return num_allocations_;
}

int64_t MemoryPool::num_unplanned() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return num_unplanned_;
}

}  // namespace brigade
