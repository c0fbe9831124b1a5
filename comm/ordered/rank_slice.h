// Which part of a vector belongs to which rank: contiguous slices in rank
// order, whose lengths differ by at most one.  The first ranks have the longer
// ones.
//
//   10 elements, 4 ranks: [0, 3) [3, 6) [6, 8) [8, 10)
//
// Thread safety: pure functions.

#ifndef BRIGADE_COMM_ORDERED_RANK_SLICE_H_
#define BRIGADE_COMM_ORDERED_RANK_SLICE_H_

#include <algorithm>
#include <cstdint>

namespace brigade {

struct RankSlice {
  int64_t offset;
  int64_t numel;
};

constexpr RankSlice slice_of_rank(int64_t numel, int rank, int world_size) {
  const int64_t shorter = numel / world_size;
  const int64_t num_longer = numel % world_size;
  return {.offset = rank * shorter + std::min<int64_t>(rank, num_longer),
          .numel = shorter + (rank < num_longer ? 1 : 0)};
}

}  // namespace brigade

#endif  // BRIGADE_COMM_ORDERED_RANK_SLICE_H_
