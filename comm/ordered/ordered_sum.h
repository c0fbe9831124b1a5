// Sums of vectors in a given order, and the slices of a vector that ranks sum.
//
// The bits of an element's sum depend on its terms alone, not on its position,
// the vector's length or threads.
//
// Thread safety: the functions write to their outputs only.

#ifndef BRIGADE_COMM_ORDERED_ORDERED_SUM_H_
#define BRIGADE_COMM_ORDERED_ORDERED_SUM_H_

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <span>

namespace brigade {

struct RankSlice {
  int64_t offset;
  int64_t numel;
};

// Returns the slice of a rank. Slices are contiguous, in rank order, and differ
// in length by at most one; the first ranks have the longer ones.
//
//   10 elements, 4 ranks: [0, 3) [3, 6) [6, 8) [8, 10)
constexpr RankSlice slice_of_rank(int64_t numel, int rank, int world_size) {
  const int64_t shorter = numel / world_size;
  const int64_t num_longer = numel % world_size;
  return {.offset = rank * shorter + std::min<int64_t>(rank, num_longer),
          .numel = shorter + (rank < num_longer ? 1 : 0)};
}

// Returns true for integers (which wrap around), floating-point and complex
// numbers; false for bool and quantized types.
inline bool can_add(at::ScalarType dtype) {
  constexpr std::array kDtypes = {
      at::kByte,   at::kChar,         at::kShort,        at::kInt,
      at::kLong,   at::kHalf,         at::kBFloat16,     at::kFloat,
      at::kDouble, at::kComplexFloat, at::kComplexDouble};
  return std::ranges::find(kDtypes, dtype) != kDtypes.end();
}

// Writes the sum of `terms` ([n] each, at least one) to `out` [n], in order and
// in one pass, times `scale` if given. float16 and bfloat16 are summed in
// float32 and rounded once, at the end.
//
// `out` may be one of `terms`, and overlaps no other.
//
// REQUIRES: contiguous CPU tensors of one dtype that can_add(); no scale for
// integers.
void ordered_sum(std::span<const at::Tensor> terms, std::optional<double> scale,
                 const at::Tensor& out);

// Returns an uninitialized accumulator [numel] for sum_in_order(): in the dtype
// of `like`, or float32 for float16 and bfloat16.
at::Tensor empty_sum(int64_t numel, const at::Tensor& like);

// Sums `count` consecutive vectors of `terms` [count * n] in order into `sum`
// [n], on the current stream of their device. Allocates no memory.
void sum_in_order(const at::Tensor& terms, int count, const at::Tensor& sum);

}  // namespace brigade

#endif  // BRIGADE_COMM_ORDERED_ORDERED_SUM_H_
