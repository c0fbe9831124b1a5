// Sums of vectors in a given order, whose bits are a function of the values
// alone, and the slices of a vector that ranks add up.
//
// An element's sum does not depend on where it lies in its vector, on the
// vector's length, or on threads.
//
// Thread safety: pure but for the outputs.

#ifndef BRIGADE_COMM_ORDERED_ORDERED_SUM_H_
#define BRIGADE_COMM_ORDERED_ORDERED_SUM_H_

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>

namespace brigade {

struct RankSlice {
  int64_t offset;
  int64_t numel;
};

// The slice of a rank: contiguous slices in rank order, whose lengths differ by
// at most one. The first ranks have the longer ones.
//
//   10 elements, 4 ranks: [0, 3) [3, 6) [6, 8) [8, 10)
constexpr RankSlice slice_of_rank(int64_t numel, int rank, int world_size) {
  const int64_t shorter = numel / world_size;
  const int64_t num_longer = numel % world_size;
  return {.offset = rank * shorter + std::min<int64_t>(rank, num_longer),
          .numel = shorter + (rank < num_longer ? 1 : 0)};
}

// Integers (modulo their range), floating-point and complex numbers; no bool,
// no quantized types.
bool can_add(at::ScalarType dtype);

// Writes into `out` [n] the sum of `terms` ([n] each, at least one), in order,
// in one pass. Multiplies the sum by `scale`, if any, at the end. Adds float16
// and bfloat16 in float32, and rounds at the end.
//
// `out` may be one of `terms`; it overlaps no other.
//
// REQUIRES: all of them contiguous, on the CPU, of one dtype that can_add(); no
// scale for integers.
void ordered_sum(std::span<const at::Tensor> terms, std::optional<double> scale,
                 const at::Tensor& out);

// The same in steps, for tensors on devices, on the current stream.

// [numel], the accumulator for numbers like those of `like`: float32 for
// float16 and bfloat16.
at::Tensor empty_sum(int64_t numel, const at::Tensor& like);

// Writes into `sum` [n] the sum of `count` consecutive vectors in `parts`
// [count * n]. Takes no memory.
void sum_in_order(const at::Tensor& parts, int count, const at::Tensor& sum);

}  // namespace brigade

#endif  // BRIGADE_COMM_ORDERED_ORDERED_SUM_H_
