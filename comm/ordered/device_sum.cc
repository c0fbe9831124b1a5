#include "brigade/comm/ordered/device_sum.h"

#include <ATen/ops/empty.h>

namespace brigade {

at::Tensor empty_sum(int64_t numel, const at::Tensor& like) {
  const at::ScalarType dtype = like.scalar_type();
  const bool is_short = dtype == at::kHalf || dtype == at::kBFloat16;
  return at::empty({numel},
                   like.options().dtype(is_short ? at::kFloat : dtype));
}

void sum_in_order(const at::Tensor& parts, int count, const at::Tensor& sum) {
  const int64_t numel = sum.numel();
  sum.copy_(parts.narrow(0, 0, numel));
  for (int i = 1; i < count; ++i) sum.add_(parts.narrow(0, i * numel, numel));
}

}  // namespace brigade
