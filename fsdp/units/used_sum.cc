#include "brigade/fsdp/units/used_sum.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

namespace brigade {
namespace {

at::Tensor on_host(std::vector<int32_t>& values) {
  return at::from_blob(values.data(), {static_cast<int64_t>(values.size())},
                       at::kInt);
}

}  // namespace

// The host goes on while it is copied: from memory of its own, which the
// allocator lends again only when the copy is done.
c10::intrusive_ptr<c10::ivalue::Future> UsedSum::launch(
    const at::Tensor& on_host) {
  const at::NoGradGuard no_grad;
  const ShardingStreams::Scope on_sums = transport_.streams().for_sums();
  const at::Tensor staging =
      at::empty(on_host.sizes(), on_host.options().pinned_memory(true));
  staging.copy_(on_host);
  sum_ = staging.to(device(), /*non_blocking=*/true);
  future_ = transport_.all_reduce(sum_);
  return future_;
}

c10::intrusive_ptr<c10::ivalue::Future> UsedSum::launch() {
  return launch(on_host(is_used_));
}

c10::intrusive_ptr<c10::ivalue::Future> UsedSum::launch_substitute() {
  return launch(at::zeros({static_cast<int64_t>(is_used_.size())}, at::kInt));
}

void UsedSum::read() {
  const at::NoGradGuard no_grad;
  future_->waitAndThrow();
  on_host(is_used_).copy_(sum_.clamp_max(1));
}

}  // namespace brigade
