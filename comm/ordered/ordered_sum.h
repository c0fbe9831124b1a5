// Adds vectors in a given order, so that the bits of the sum are known.
//
// Element by element, with nothing else in between: no element's sum depends on
// where it lies in its vector, on the vector's length, or on threads.
//
// Thread safety: pure but for `out`.

#ifndef BRIGADE_COMM_ORDERED_ORDERED_SUM_H_
#define BRIGADE_COMM_ORDERED_ORDERED_SUM_H_

#include <ATen/core/Tensor.h>

#include <optional>
#include <span>

namespace brigade {

// What can be added: integers (modulo their range), floating-point and complex
// numbers; no bool, no quantized types.
bool can_add(at::ScalarType dtype);

// Writes into `out` [n] the sum of `terms` ([n] each, at least one), in one
// pass: those of each `group_size` consecutive ones first, in order, then these
// sums, in order.
//
//   group_size 2, 4 terms: (a + b) + (c + d);   group_size 4: ((a + b) + c) + d
//
// The sum is multiplied by `scale`, if any, at the end.  float16 and bfloat16
// are added in float32, and rounded at the end of each level: once for one
// level; at two levels, as often as when the groups' sums travel.
//
// `out` may be one of `terms`, and overlaps none of them else.
//
// REQUIRES: all of them contiguous, on the CPU, of one dtype that can_add();
// group_size divides the number of terms; no scale for integers.
void ordered_sum(std::span<const at::Tensor> terms, size_t group_size,
                 std::optional<double> scale, const at::Tensor& out);

}  // namespace brigade

#endif  // BRIGADE_COMM_ORDERED_ORDERED_SUM_H_
