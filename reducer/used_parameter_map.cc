#include "brigade/reducer/used_parameter_map.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <exception>
#include <utility>
#include <vector>

namespace brigade {
namespace {

c10::intrusive_ptr<c10::ivalue::Future> future_of(c10d::Work& work) {
  try {
    return work.getFuture();
  } catch (const std::exception&) {
    return nullptr;  // a backend of somebody's own, which can't tell
  }
}

}  // namespace

UsedParameterMap::UsedParameterMap(size_t num_replicas, size_t num_parameters,
                                   c10::Device device)
    : local_(at::zeros({static_cast<int64_t>(num_replicas),
                        static_cast<int64_t>(num_parameters)},
                       at::kInt)),
      marks_(local_.mutable_data_ptr<int32_t>()),
      sum_(at::empty({static_cast<int64_t>(num_parameters)},
                     at::TensorOptions(at::kInt).device(device))),
      host_sum_(at::zeros({static_cast<int64_t>(num_parameters)}, at::kInt)) {}

void UsedParameterMap::clear_marks() { local_.zero_(); }

c10::intrusive_ptr<c10::ivalue::Future> UsedParameterMap::launch(
    c10d::ProcessGroup& group) {
  const at::NoGradGuard no_grad;
  try {
    finish();  // the last sum, if nobody needed it
  } catch (const std::exception&) {
    work_ = nullptr;  // nor its failure
  }
  const at::Tensor used = local_.size(0) == 1
                              ? local_[0]
                              : local_.sum(0, /*keepdim=*/false, at::kInt);
  if (sum_.is_cpu()) {
    sum_.copy_(used);
  } else {
    // Its memory goes back to the caching allocator, which hands it out again
    // only after the copy is done.
    const at::Tensor staging =
        at::empty_like(used, used.options().pinned_memory(true));
    staging.copy_(used);
    // New memory: that of the last sum belongs to the stream that launched it,
    // and this one may not be behind it.
    sum_ = staging.to(sum_.device(), /*non_blocking=*/true);
  }
  host_sum_.reset();
  std::vector<at::Tensor> tensors = {sum_};
  work_ = group.allreduce(tensors);
  return future_of(*work_);
}

at::Tensor UsedParameterMap::abandon() {
  work_ = nullptr;
  host_sum_ = at::zeros(sum_.sizes(), at::kInt);
  return std::exchange(sum_, at::empty_like(sum_));
}

void UsedParameterMap::finish() {
  if (!work_) return;
  work_->wait();
  work_ = nullptr;
}

// Copied at once: only the stream that has waited is behind the collective.
void UsedParameterMap::wait() {
  finish();
  if (!host_sum_.defined()) host_sum_ = sum_.cpu();
}

}  // namespace brigade
