// All that a layout sees of a parameter.

#ifndef BRIGADE_FSDP_LAYOUT_SHARD_SPEC_H_
#define BRIGADE_FSDP_LAYOUT_SHARD_SPEC_H_

#include <cstdint>
#include <limits>
#include <span>

namespace brigade {

// As `block_numel`: the parameter is one block, so one rank holds all of it.
inline constexpr int64_t kWholeParameter = std::numeric_limits<int64_t>::max();

struct ShardSpec {
  int64_t numel = 0;        // may be 0
  int64_t block_numel = 1;  // elements that stay together, counted from the
                            // parameter's first; the last block may be shorter

  friend bool operator==(const ShardSpec&, const ShardSpec&) = default;
};

inline int64_t total_numel(std::span<const ShardSpec> parameters) {
  int64_t total = 0;
  for (const ShardSpec& parameter : parameters) total += parameter.numel;
  return total;
}

}  // namespace brigade

#endif  // BRIGADE_FSDP_LAYOUT_SHARD_SPEC_H_
