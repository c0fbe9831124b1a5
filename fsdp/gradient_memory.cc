#include "brigade/fsdp/gradient_memory.h"

#include <chrono>
#include <utility>

#include "brigade/comm/timed_wait.h"

namespace brigade {
namespace {

constexpr std::chrono::milliseconds kPatience{250};

}  // namespace

at::Tensor GradientMemory::acquire(int64_t bytes) {
  reclaim(max_reducing_ - 1);
  return pool_.acquire(bytes);
}

void GradientMemory::release(at::Tensor buffer) {
  if (buffer.defined()) pool_.release(std::move(buffer));
}

void GradientMemory::release_behind(at::Tensor buffer, FuturePtr reduction) {
  reducing_.push_back(
      {.buffer = std::move(buffer), .reduction = std::move(reduction)});
}

std::vector<at::Tensor> GradientMemory::abandon() {
  std::vector<at::Tensor> buffers;
  for (Reducing& reducing : std::exchange(reducing_, {})) {
    buffers.push_back(std::move(reducing.buffer));
  }
  return buffers;
}

// An error is told to who delivers the sum.
void GradientMemory::reclaim(size_t max_left) {
  while (!reducing_.empty()) {
    c10::ivalue::Future& reduction = *reducing_.front().reduction;
    if (!reduction.completed()) {
      if (reducing_.size() <= max_left || !waits_) return;
      waits_ = wait_for(reduction, kPatience);
      if (!waits_) return;
    }
    Reducing oldest = std::move(reducing_.front());
    reducing_.pop_front();
    pool_.release(std::move(oldest.buffer));
  }
  waits_ = true;
}

}  // namespace brigade
