#include "brigade/fsdp/memory_pool.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "brigade/fsdp/sharding_streams.h"

namespace brigade {

MemoryPool::MemoryPool(c10::Device device)
    : device_(device), owner_(stream_beside_the_program(device)) {}

MemoryPool::~MemoryPool() {
  for (Buffer& buffer : free_) give_up(std::move(buffer));
}

Buffer MemoryPool::acquire(int64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto by_size = [](const Buffer& buffer) {
    return buffer.memory.numel();
  };
  auto found = free_.end();
  for (auto buffer = free_.begin(); buffer != free_.end(); ++buffer) {
    if (by_size(*buffer) < bytes) continue;
    if (found == free_.end() || by_size(*buffer) < by_size(*found)) {
      found = buffer;
    }
  }
  if (found != free_.end()) {
    Buffer buffer = std::move(*found);
    free_.erase(found);
    return buffer;
  }
  if (!free_.empty()) {
    const auto largest = std::ranges::max_element(free_, {}, by_size);
    bytes_ -= by_size(*largest);
    give_up(std::move(*largest));
    free_.erase(largest);
  }
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
  free_.push_back(std::move(buffer));
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

}  // namespace brigade
