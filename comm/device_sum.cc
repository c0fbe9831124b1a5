#include "brigade/comm/device_sum.h"

#include <cstdint>

namespace brigade {

at::Tensor sum_in_order(const at::Tensor& parts, int count) {
  const at::ScalarType dtype = parts.scalar_type();
  const bool is_short = dtype == at::kHalf || dtype == at::kBFloat16;
  const int64_t numel = parts.numel() / count;
  at::Tensor sum = parts.narrow(0, 0, numel)
                       .to(is_short ? at::kFloat : dtype,
                           /*non_blocking=*/false, /*copy=*/true);
  for (int i = 1; i < count; ++i) sum.add_(parts.narrow(0, i * numel, numel));
  return sum;
}

}  // namespace brigade
