#include "brigade/fsdp/buffer_memory.h"

#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <utility>

#include "brigade/fsdp/streams.h"

namespace brigade {
namespace {

at::Tensor allocate(int64_t bytes, c10::Device device,
                    const std::optional<c10::Stream>& owner) {
  std::optional<c10::StreamGuard> on_owner;
  if (owner) on_owner.emplace(*owner);
  return at::empty({bytes}, at::TensorOptions(at::kByte).device(device));
}

}  // namespace

BufferMemory::BufferMemory(c10::Device device)
    : device_(device), owner_(stream_beside_the_program(device)) {}

BufferMemory::~BufferMemory() {
  for (Memory& memory : memory_) free(std::move(memory));
}

Lease BufferMemory::acquire(int64_t bytes) {
  const size_t number = list_.acquire(bytes);
  if (list_.is_extra(number)) ++num_extra_;
  ++num_lent_;
  peak_bytes_ = std::max(peak_bytes_, list_.total_bytes());
  if (memory_.size() <= number) memory_.resize(number + 1);
  Memory& memory = memory_[number];
  if (!memory.bytes.defined() ||
      memory.bytes.numel() < list_.bytes_of(number)) {
    free(std::exchange(memory, {}));
    memory.bytes = allocate(list_.bytes_of(number), device_, owner_);
    memory.last_use = owner_ ? StreamPoint::of({&*owner_, 1}) : StreamPoint();
  }
  return {.bytes = memory.bytes,
          .number = number,
          .last_use = std::exchange(memory.last_use, {})};
}

void BufferMemory::release(Lease lease, const StreamPoint& last_use) {
  if (!lease) return;
  memory_[lease.number].last_use = last_use;
  list_.release(lease.number);
  --num_lent_;
  if (next_plan_ && num_lent_ == 0) adopt_plan();
}

void BufferMemory::plan(std::vector<int64_t> bytes) {
  next_plan_ = std::move(bytes);
  if (num_lent_ == 0) adopt_plan();
}

void BufferMemory::adopt_plan() {
  std::vector<int64_t> bytes = *std::exchange(next_plan_, std::nullopt);
  if (bytes == list_.planned_bytes()) return;
  std::vector<Memory> free_memory;
  std::swap(free_memory, memory_);
  memory_.resize(bytes.size());
  // Memory of the right size stays.
  for (size_t i = 0; i < bytes.size(); ++i) {
    const auto found = std::ranges::find_if(free_memory, [&](const Memory& m) {
      return m.bytes.defined() && m.bytes.numel() == bytes[i];
    });
    if (found != free_memory.end()) memory_[i] = std::exchange(*found, {});
  }
  for (Memory& memory : free_memory) free(std::move(memory));
  list_ = BufferList(std::move(bytes));
}

void BufferMemory::drop_extra() {
  list_.drop_extra();
  for (size_t i = list_.num_planned(); i < memory_.size(); ++i) {
    if (i >= list_.size() || list_.bytes_of(i) == 0) {
      free(std::exchange(memory_[i], {}));
    }
  }
  memory_.resize(std::min(memory_.size(), list_.size()));
}

std::vector<int64_t> BufferMemory::keep_extra() {
  if (next_plan_) {
    drop_extra();
    return *next_plan_;
  }
  list_.keep_extra();
  return list_.planned_bytes();
}

// The owner's stream is ordered after the last use, and the allocator reuses
// the memory there.
void BufferMemory::free(Memory memory) {
  if (!owner_ || !memory.bytes.defined()) return;
  const c10::StreamGuard on_owner(*owner_);
  memory.last_use.wait();
}

}  // namespace brigade
