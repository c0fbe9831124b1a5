// Sums on a device in a given order, so that the bits are known: what
// ordered_sum.h is for the CPU.

#ifndef BRIGADE_COMM_DEVICE_SUM_H_
#define BRIGADE_COMM_DEVICE_SUM_H_

#include <ATen/core/Tensor.h>

namespace brigade {

// [n], the sum of `count` parts that lie one behind the other in `parts` [count
// * n], the first one first. float16 and bfloat16 are added in float32, which
// the sum has then. On the current stream.
at::Tensor sum_in_order(const at::Tensor& parts, int count);

}  // namespace brigade

#endif  // BRIGADE_COMM_DEVICE_SUM_H_
