#include "brigade/fsdp/memory_pool.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

namespace brigade {

at::Tensor MemoryPool::acquire(int64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto by_size = [](const at::Tensor& buffer) { return buffer.numel(); };
  auto found = free_.end();
  for (auto buffer = free_.begin(); buffer != free_.end(); ++buffer) {
    if (buffer->numel() < bytes) continue;
    if (found == free_.end() || buffer->numel() < found->numel()) {
      found = buffer;
    }
  }
  if (found != free_.end()) {
    at::Tensor buffer = std::move(*found);
    free_.erase(found);
    return buffer;
  }
  if (!free_.empty()) {
    const auto largest = std::ranges::max_element(free_, {}, by_size);
    bytes_ -= largest->numel();
    free_.erase(largest);
  }
  const at::NoGradGuard no_grad;
  bytes_ += bytes;
  peak_bytes_ = std::max(peak_bytes_, bytes_);
  ++num_allocations_;
  return at::empty({bytes},
                   at::TensorOptions().dtype(at::kByte).device(device_));
}

void MemoryPool::release(at::Tensor buffer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  free_.push_back(std::move(buffer));
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
