// Sums on a device in a given order, so that the bits are known: what
// ordered_sum.h is for the CPU.

#ifndef BRIGADE_COMM_ORDERED_DEVICE_SUM_H_
#define BRIGADE_COMM_ORDERED_DEVICE_SUM_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace brigade {

// [numel], in which numbers like those of `like` are added up: float16 and
// bfloat16 in float32.
at::Tensor empty_sum(int64_t numel, const at::Tensor& like);

// Writes into `sum` [n] that of `count` parts that lie one behind the other in
// `parts` [count * n], the first one first. Takes no memory. On the current
// stream.
void sum_in_order(const at::Tensor& parts, int count, const at::Tensor& sum);

}  // namespace brigade

#endif  // BRIGADE_COMM_ORDERED_DEVICE_SUM_H_
