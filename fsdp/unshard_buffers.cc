#include "brigade/fsdp/unshard_buffers.h"

#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <utility>

namespace brigade {

UnshardBuffers::UnshardBuffers(c10::Device device)
    : device_(device), owner_(stream_beside_the_program(device)) {}

UnshardBuffers::~UnshardBuffers() { shrink_to(0); }

Lease UnshardBuffers::acquire(int64_t bytes) {
  // Those that are too small come last, the largest of them first.
  const auto rank = [bytes](const Lease& buffer) {
    const int64_t size = buffer.bytes.numel();
    return std::pair(size < bytes, size < bytes ? -size : size);
  };
  const auto best = std::ranges::min_element(free_, {}, rank);
  if (best != free_.end()) {
    Lease found = std::move(*best);
    free_.erase(best);
    if (found.bytes.numel() >= bytes) return found;
    free(std::move(found));
  }
  std::optional<c10::StreamGuard> on_owner;
  if (owner_) on_owner.emplace(*owner_);
  Lease made = {
      .bytes = at::empty({bytes}, at::TensorOptions(at::kByte).device(device_)),
      .last_use = StreamPoint::now(device_)};
  total_bytes_ += bytes;
  peak_bytes_ = std::max(peak_bytes_, total_bytes_);
  return made;
}

void UnshardBuffers::release(Lease lease, const StreamPoint& last_use) {
  if (!lease) return;
  lease.last_use = last_use;
  free_.push_back(std::move(lease));
}

void UnshardBuffers::shrink_to(int64_t bytes) {
  while (total_bytes_ > bytes && !free_.empty()) {
    free(std::move(free_.back()));
    free_.pop_back();
  }
}

// The owner's stream is ordered after the last use, and the allocator reuses
// the memory there.
void UnshardBuffers::free(Lease buffer) {
  total_bytes_ -= buffer.bytes.numel();
  if (!owner_) return;
  const c10::StreamGuard on_owner(*owner_);
  buffer.last_use.wait();
}

}  // namespace brigade
