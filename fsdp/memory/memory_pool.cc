#include "brigade/fsdp/memory/memory_pool.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

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
  ++plan_number_;
  for (Planned& planned : std::exchange(planned_, {})) {
    if (!planned.buffer.memory.defined()) continue;  // lent, or never made
    planned.buffer.planned.reset();
    free_.push_back({.buffer = std::move(planned.buffer)});
  }
  for (const int64_t bytes : plan.buffer_bytes()) {
    planned_.push_back({.bytes = bytes});
  }
  awaited_.clear();
  for (const auto& [number, lent] : record_.from_earlier()) {
    const std::span<const size_t> buffers = plan.of(lent.use);
    if (buffers.empty() || !planned_[buffers.back()].is_free) continue;
    planned_[buffers.back()].is_free = false;
    awaited_.emplace(number, buffers.back());
  }
  for (Planned& planned : planned_) {
    const auto same =
        std::ranges::find(free_, planned.bytes,
                          [](const Unplanned& free) { return size_of(free); });
    if (!planned.is_free || same == free_.end()) continue;
    planned.buffer = std::move(same->buffer);
    free_.erase(same);
  }
  while (!free_.empty()) give_up_largest();
  plan_ = std::move(plan);
}

Buffer MemoryPool::acquire(int64_t bytes, std::optional<MemoryUse> use) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::optional<size_t> planned;
  if (use) {
    planned = plan_.buffer_for(
        *use, is_recording_ ? record_.num_begun(*use) : size_t{0});
  }
  Buffer buffer = acquire_memory(bytes, planned);
  if (!is_recording_) return buffer;
  if (!buffer.planned) was_enough_ = false;
  if (use) buffer.use = record_.begin(*use, bytes);
  return buffer;
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
  buffer.plan_number = plan_number_;
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
  std::optional<size_t> awaited;
  if (const auto use = std::exchange(buffer.use, {})) {
    awaited = end_of_use(*use);
  }
  come_back(std::move(buffer), awaited);
}

// `awaited`: which of the plan's it is to be.
void MemoryPool::come_back(Buffer buffer, std::optional<size_t> awaited) {
  if (buffer.planned && buffer.plan_number == plan_number_) {
    awaited = buffer.planned;
  }
  if (!awaited || planned_[*awaited].bytes != buffer.memory.numel()) {
    buffer.planned.reset();
    free_.push_back({.buffer = std::move(buffer)});
    return;
  }
  planned_[*awaited].buffer = std::move(buffer);
  planned_[*awaited].is_free = true;
}

void MemoryPool::end_use(size_t number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  end_of_use(number);
}

std::optional<size_t> MemoryPool::end_of_use(size_t number) {
  record_.end(number);
  const auto found = awaited_.find(number);
  if (found == awaited_.end()) return std::nullopt;
  const size_t awaited = found->second;
  awaited_.erase(found);
  planned_[awaited].is_free = true;
  return awaited;
}

void MemoryPool::set_recording(bool value) {
  const std::lock_guard<std::mutex> lock(mutex_);
  is_recording_ = value;
}

RecordedStep MemoryPool::end_step() {
  const std::lock_guard<std::mutex> lock(mutex_);
  RecordedStep step = {.uses = record_.end_step()};
  step.is_as_planned =
      std::exchange(was_enough_, true) || plan_.suffices_for(step.uses);
  return step;
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
