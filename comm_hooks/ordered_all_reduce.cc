#include "brigade/comm_hooks/ordered_all_reduce.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <cstdint>

#include "brigade/comm/group/group_collectives.h"
#include "brigade/comm/streams/streams.h"

namespace brigade {

namespace {

// On the current stream.
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
  // Before anything is launched: a lack of memory is this rank's alone then.
  const at::Tensor whole =
      is_even ? flat : at::zeros({slice_numel * size}, flat.options());
  const at::Tensor parts = at::empty_like(whole);
  const at::Tensor own = at::empty({slice_numel}, flat.options());
  const at::Tensor sum = empty_sum(slice_numel, parts);

  if (!is_even) whole.narrow(0, 0, flat.numel()).copy_(flat);
  wait_on_current_stream(all_to_all_into(group, parts, whole));
  sum_in_order(parts, size, sum);
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
  // Pairs with what the calling thread's stream has written into the tensor.
  launch.block(stream->second);
  return reduce_on_device(*group_.lock(), tensor, scale);
}

}  // namespace brigade
