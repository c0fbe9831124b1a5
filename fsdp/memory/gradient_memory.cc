#include "brigade/fsdp/memory/gradient_memory.h"

#include <chrono>
#include <utility>

#include "brigade/comm/streams/timed_wait.h"

namespace brigade {
namespace {

constexpr std::chrono::milliseconds kPatience{250};

}  // namespace

GradientMemory::~GradientMemory() {
  for (Reducing& reducing : reducing_) {
    if (reducing.reduction->completed()) give_back(std::move(reducing));
  }
}

void GradientMemory::begin_backward(std::function<size_t()> num_lendable) {
  num_lendable_ = std::move(num_lendable);
  num_launched_ = 0;
}

Buffer GradientMemory::acquire(int64_t bytes, std::optional<MemoryUse> use) {
  reclaim(max_reducing_ - 1);
  return pool_.acquire(bytes, use);
}

void GradientMemory::release(Buffer buffer) {
  if (buffer.memory.defined()) pool_.release(std::move(buffer));
}

void GradientMemory::release_behind(Buffer buffer, FuturePtr reduction) {
  ++num_launched_;
  uses_.push_back(std::exchange(buffer.use, {}));
  reducing_.push_back(
      {.buffer = std::move(buffer), .reduction = std::move(reduction)});
}

std::vector<at::Tensor> GradientMemory::abandon() {
  std::vector<at::Tensor> buffers;
  for (Reducing& reducing : std::exchange(reducing_, {})) {
    buffers.push_back(std::move(reducing.buffer.memory));
  }
  uses_.clear();
  return buffers;
}

// An error is told to who delivers the sum.
void GradientMemory::reclaim(size_t max_left) {
  end_uses(max_left);
  while (!reducing_.empty() && may_wait_for_oldest_of(reducing_.size()) &&
         is_over(reducing_.front(), max_left)) {
    Reducing oldest = std::move(reducing_.front());
    reducing_.pop_front();
    give_back(std::move(oldest));
  }
  if (reducing_.empty()) waits_ = true;
}

void GradientMemory::end_uses(size_t max_left) {
  while (uses_.size() > max_left && may_wait_for_oldest_of(uses_.size())) {
    if (uses_.front()) pool_.end_use(*uses_.front());
    uses_.pop_front();
  }
}

// Of so many that were launched last.
bool GradientMemory::may_wait_for_oldest_of(size_t num_reductions) const {
  if (!num_lendable_ || num_reductions > num_launched_) return true;
  return num_launched_ - num_reductions < num_lendable_();
}

void GradientMemory::give_back(Reducing reducing) {
  reducing.buffer.last_use = end_of(*reducing.reduction);
  pool_.release(std::move(reducing.buffer));
}

bool GradientMemory::is_over(const Reducing& oldest, size_t max_left) {
  const bool has_to_be = reducing_.size() > max_left;
  if (oldest.reduction->completed()) {
    // A device may not have begun it: it is waited for if it has to be.
    return streams_.device().is_cpu() || has_to_be;
  }
  if (has_to_be && waits_) waits_ = wait_for(*oldest.reduction, kPatience);
  return has_to_be && waits_;
}

// Pairs with the wait of whoever gets its memory.
StreamPoint GradientMemory::end_of(c10::ivalue::Future& reduction) const {
  if (streams_.device().is_cpu()) return {};
  const ShardingStreams::Scope on_sums = streams_.for_sums();
  reduction.wait();
  return StreamPoint::now(streams_.device());
}

}  // namespace brigade
