// Which elements move where when a unit's shards are laid out anew: for another
// number of ranks, or with other blocks.
//
// Example: a checkpoint written by 2 ranks, read by rank 1 of 3, opens the
// shards that the copies with `to_rank` 1 name.
//
// Thread safety: pure functions.

#ifndef BRIGADE_FSDP_RESHARD_COPIES_H_
#define BRIGADE_FSDP_RESHARD_COPIES_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "brigade/fsdp/shard_layout.h"

namespace brigade {

// Offsets and lengths in elements, offsets within the shards.
struct ReshardCopy {
  size_t parameter = 0;
  int64_t from_rank = 0;
  int64_t from_offset = 0;
  int64_t to_rank = 0;
  int64_t to_offset = 0;
  int64_t numel = 0;  // > 0

  friend bool operator==(const ReshardCopy&, const ReshardCopy&) = default;
};

// Each element of each parameter once, ascending; padding is not copied. There
// are at most as many copies as parameters, and cuts in both layouts, together.
//
// Errors:
//   InvalidArgument  the layouts differ in parameters or their numels.
absl::StatusOr<std::vector<ReshardCopy>> reshard_copies(const ShardLayout& from,
                                                        const ShardLayout& to);

}  // namespace brigade

#endif  // BRIGADE_FSDP_RESHARD_COPIES_H_
