#include "brigade/comm/ordered_on_device.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>

#include <cstdint>

#include "brigade/comm/completed_future.h"
#include "brigade/comm/device_sum.h"
#include "brigade/comm/group_collectives.h"

namespace brigade {

c10::intrusive_ptr<c10::ivalue::Future> OrderedOnDevice::all_reduce(
    c10d::ProcessGroup& group, const at::Tensor& tensor, double scale) {
  const at::NoGradGuard no_grad;
  const at::Tensor flat =
      (tensor.is_complex() ? at::view_as_real(tensor) : tensor).view(-1);
  const int size = group.getSize();
  const int64_t slice_numel = (flat.numel() + size - 1) / size;
  const bool is_even = slice_numel * size == flat.numel();
  const auto launch = CommunicationStreams::record_launch(tensor.device());
  c10::intrusive_ptr<c10::ivalue::Future> done;
  streams_.run(launch, {tensor}, [&] {
    if (size == 1) {
      flat.mul_(scale);
    } else if (flat.numel() > 0) {
      at::Tensor whole = flat;
      if (!is_even) {
        whole = at::zeros({slice_numel * size}, flat.options());
        whole.narrow(0, 0, flat.numel()).copy_(flat);
      }
      const at::Tensor parts = at::empty_like(whole);
      exchange_parts(group, parts, whole)->wait();
      at::Tensor sum = sum_of_rows(parts, size);
      if (scale != 1) sum.mul_(scale);
      // Once more through the wire's dtype, which rounds.
      gather_into(group, whole, sum.to(flat.scalar_type()))->wait();
      if (!is_even) flat.copy_(whole.narrow(0, 0, flat.numel()));
    }
    done = completed_future({tensor});
  });
  return done;
}

at::Tensor OrderedOnDevice::sum_of_rows(const at::Tensor& parts,
                                        int num_ranks) const {
  const int row_size = row_size_.value_or(num_ranks);
  const int num_rows = num_ranks / row_size;
  if (num_rows == 1) return sum_in_order(parts, num_ranks);
  const int64_t slice_numel = parts.numel() / num_ranks;
  // A row's sum is rounded, as where it travels to other rows.
  const at::Tensor of_rows =
      at::empty({num_rows * slice_numel}, parts.options());
  for (int row = 0; row < num_rows; ++row) {
    of_rows.narrow(0, row * slice_numel, slice_numel)
        .copy_(sum_in_order(parts.narrow(0, row * row_size * slice_numel,
                                         row_size * slice_numel),
                            row_size));
  }
  return sum_in_order(of_rows, num_rows);
}

}  // namespace brigade
