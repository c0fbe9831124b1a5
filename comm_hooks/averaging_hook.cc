#include "brigade/comm_hooks/averaging_hook.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "brigade/comm/group/group_collectives.h"
#include "brigade/comm/ordered/host_sums.h"
#include "brigade/comm/streams/streams.h"
#include "brigade/comm_hooks/comm_hooks.h"

namespace brigade {
namespace {

// Runs on the current stream.
OrderedAllReduce::FuturePtr reduce_on_device(c10d::ProcessGroup& group,
                                             const at::Tensor& tensor,
                                             double scale) {
  const at::NoGradGuard no_grad;
  const at::Tensor flat =
      (tensor.is_complex() ? at::view_as_real(tensor) : tensor).view(-1);
  const int size = group.getSize();
  if (size == 1) {
    flat.mul_(scale);
    return completed_future({tensor});
  }
  if (flat.numel() == 0) return completed_future({tensor});

  const int64_t slice_numel = (flat.numel() + size - 1) / size;
  const bool is_even = slice_numel * size == flat.numel();
  // Allocates before any launch: an out-of-memory error leaves no collective
  // half done.
  const at::Tensor whole =
      is_even ? flat : at::zeros({slice_numel * size}, flat.options());
  const at::Tensor terms = at::empty_like(whole);
  const at::Tensor own = at::empty({slice_numel}, flat.options());
  const at::Tensor sum = empty_sum(slice_numel, terms);

  if (!is_even) whole.narrow(0, 0, flat.numel()).copy_(flat);
  wait_on_current_stream(all_to_all_into(group, terms, whole));
  sum_in_order(terms, size, sum);
  if (scale != 1) sum.mul_(scale);
  own.copy_(sum);
  wait_on_current_stream(all_gather_into(group, whole, own));
  if (!is_even) flat.copy_(whole.narrow(0, 0, flat.numel()));
  return completed_future({tensor});
}

}  // namespace

void OrderedAllReduce::connect() { collectives_.emplace(group_.lock()); }

void OrderedAllReduce::connect_for(std::span<const at::Tensor> tensors) {
  if (std::ranges::any_of(tensors, &at::Tensor::is_cpu)) connect();
}

OrderedAllReduce::FuturePtr OrderedAllReduce::run(const at::Tensor& tensor,
                                                  double scale) {
  if (tensor.is_cpu()) {
    if (!collectives_) connect();
    return collectives_->all_reduce(tensor, scale);
  }
  const c10::Device device = tensor.device();
  auto stream = streams_.find(device.index());
  if (stream == streams_.end()) {
    stream = streams_.emplace(device.index(), side_stream(device)).first;
  }
  c10::Event launch(device.type());
  launch.record(current_stream(device));
  tensor.record_stream(stream->second);
  const c10::StreamGuard on_stream(stream->second);
  // Orders the side stream after the tensor's writer.
  launch.block(stream->second);
  return reduce_on_device(*group_.lock(), tensor, scale);
}

AveragingHook::AveragingHook(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    std::optional<at::ScalarType> wire_dtype,
    std::shared_ptr<OrderedAllReduce> ordered, bool takes_host_sums)
    : group_(group, "a comm hook"),
      wire_dtype_(wire_dtype),
      ordered_(std::move(ordered)),
      takes_host_sums_(takes_host_sums),
      divisor_(group_.size()) {}

void AveragingHook::divide_by_world_size() {
  next_divisor_ = nullptr;
  divisor_ = group_.size();
}

void AveragingHook::divide_by(std::function<double()> divisor) {
  next_divisor_ = std::move(divisor);
}

double AveragingHook::divisor() const {
  if (next_divisor_) {
    divisor_ = next_divisor_();
    next_divisor_ = nullptr;
  }
  return divisor_;
}

c10::intrusive_ptr<c10::ivalue::Future> AveragingHook::runHook(
    c10d::GradBucket& bucket) {
  const at::Tensor& buffer = bucket.getBuffer();
  const at::Tensor reals =
      buffer.is_complex() ? at::view_as_real(buffer) : buffer;
  if (ordered_) return ordered_->run(reals, 1.0 / divisor());
  if (host_sums_ && HostSums::can_reduce(reals)) {
    return host_sums_->all_reduce(reals);
  }
  std::vector<at::Tensor> tensors = {reals};
  return future_of(group_.lock()->allreduce(tensors), buffer);
}

at::Tensor AveragingHook::parseHookResult(const c10::IValue& result) {
  return tensor_of_hook_result(result);
}

WireFormat AveragingHook::wire_format(at::ScalarType gradient_dtype) const {
  const bool compress =
      wire_dtype_.has_value() && c10::isFloatingType(gradient_dtype) &&
      c10::elementSize(gradient_dtype) > c10::elementSize(*wire_dtype_);
  return {.dtype = compress ? *wire_dtype_ : gradient_dtype,
          .scale = ordered_ ? 1.0 : 1.0 / divisor()};
}

CommHookPtr all_reduce_hook(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  return std::make_shared<AveragingHook>(group);
}

CommHookPtr fp16_hook(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  return std::make_shared<AveragingHook>(group, at::kHalf);
}

CommHookPtr bf16_hook(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  return std::make_shared<AveragingHook>(group, at::kBFloat16);
}

CommHookPtr ordered_hook(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  auto ordered = std::make_shared<OrderedAllReduce>(group);
  ordered->connect();
  return std::make_shared<AveragingHook>(group, std::nullopt,
                                         std::move(ordered));
}

std::shared_ptr<AveragingHook> default_hook(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    std::optional<at::ScalarType> wire_dtype,
    std::shared_ptr<OrderedAllReduce> ordered) {
  return std::make_shared<AveragingHook>(group, wire_dtype, std::move(ordered),
                                         /*takes_host_sums=*/true);
}

}  // namespace brigade
