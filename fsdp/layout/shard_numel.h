// How long the equal shards of a unit must be, so that no block is cut.
//
// Shards are equal in length, for the collectives, and a parameter lies in one
// piece in the gathered buffer, for it is a view of it. So padding goes before
// a parameter, never into it, and a parameter that spans two cuts or more needs
// shards that its blocks divide.
//
// Thread safety: pure functions.

#ifndef BRIGADE_FSDP_LAYOUT_SHARD_NUMEL_H_
#define BRIGADE_FSDP_LAYOUT_SHARD_NUMEL_H_

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "brigade/fsdp/layout/shard_spec.h"

namespace brigade {

// Offsets of the parameters in the gathered buffer, each the least that cuts no
// block and follows the parameter before; nullopt if they do not fit into
// `num_ranks` shards of `shard_numel` elements. No other offsets fit then: the
// earlier a parameter ends, the earlier may the next one begin.
std::optional<std::vector<int64_t>> place_parameters(
    std::span<const ShardSpec> parameters, int64_t num_ranks,
    int64_t shard_numel);

// The least number of elements per rank that holds the blocks in order, if a
// parameter might have holes: no layout has shorter shards. It is less than
// N/F + G, for N elements on F ranks in blocks of at most G.
int64_t least_shard_numel(std::span<const ShardSpec> parameters,
                          int64_t num_ranks);

// A multiple of `alignment` for which place_parameters() finds offsets:
// least_shard_numel() rounded up, where that fits, which is the least possible
// and always fits with blocks of 1 element; else the least multiple, from there
// on, that the blocks of all parameters longer than itself divide.
//
// Padding: less than F * alignment with blocks of 1 element; else less than
// F * (G + L), with L the least common multiple of `alignment` and the blocks
// of parameters longer than N/F.
//
// REQUIRES: numels >= 0, blocks, `num_ranks` and `alignment` > 0; the sum of
// numels, and `alignment`, <= 2^48.
int64_t choose_shard_numel(std::span<const ShardSpec> parameters,
                           int64_t num_ranks, int64_t alignment);

}  // namespace brigade

#endif  // BRIGADE_FSDP_LAYOUT_SHARD_NUMEL_H_
