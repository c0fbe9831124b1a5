// Where the parameters of a flat tensor lie, and which elements each rank
// holds: equal shards, padding at the end, blocks that are never cut.
//
// Thread safety: values and pure functions.

#ifndef BRIGADE_FSDP_SHARD_LAYOUT_H_
#define BRIGADE_FSDP_SHARD_LAYOUT_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/statusor.h"

namespace brigade {

// All that a layout sees of a parameter.

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

// How long the equal shards of a unit must be, so that no block is cut.
//
// Shards are equal in length, for the collectives, and a parameter lies in one
// piece in the gathered buffer, for it is a view of it. So padding goes before
// a parameter, never into it, and a parameter that spans two cuts or more needs
// shards that its blocks divide.
//
// Thread safety: pure functions.

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

// Which rank holds which elements of a unit's parameters.
//
// The parameters of a unit, one after the other, are cut into F equal shards;
// what is missing is padding, which lies at the end where blocks are of one
// element. The gathered buffer holds the shards by rank, so every parameter is
// a view of it, and nothing is copied in or out. A parameter's own shard on a
// rank is what it has in common with the rank's range, and may be empty.
//
// Lengths are in elements of one dtype: a reduction has one. A unit of several
// dtypes has a layout for each.
//
// A layout is a value: no tensors, no communication.
//
// Example: a 4 x 3 weight and its bias, on 16 ranks.
//
//   const std::vector<ShardSpec> specs = {{.numel = 12}, {.numel = 3}};
//   absl::StatusOr<ShardLayout> layout = ShardLayout::create(specs, 16);
//   layout->range(1, 12);  // {.in_parameter = 0, .in_shard = 0, .numel = 1}
//
// Thread safety: immutable after create(); any thread may read.

// The elements of one parameter that one rank holds; all 0 if there are none.
struct ShardRange {
  int64_t in_parameter = 0;  // offset of the first
  int64_t in_shard = 0;
  int64_t numel = 0;

  friend bool operator==(const ShardRange&, const ShardRange&) = default;
};

// begin <= rank < end.
struct RankRange {
  int64_t begin = 0;
  int64_t end = 0;

  friend bool operator==(const RankRange&, const RankRange&) = default;
};

class ShardLayout {
 public:
  // `alignment`: elements of which a shard's length is a multiple. How long
  // shards are, and how much of that is padding: choose_shard_numel().
  //
  // Errors:
  //   InvalidArgument  there are no parameters, a numel is < 0, a block,
  //                    `num_ranks` or `alignment` is < 1, the parameters or
  //                    `alignment` exceed 2^48 elements, or the gathered buffer
  //                    2^63 - 1.
  static absl::StatusOr<ShardLayout> create(std::vector<ShardSpec> parameters,
                                            int64_t num_ranks,
                                            int64_t alignment = 1);

  const std::vector<ShardSpec>& parameters() const { return parameters_; }
  int64_t num_ranks() const { return num_ranks_; }
  int64_t shard_numel() const { return shard_numel_; }  // on every rank

  // Of the gathered buffer: num_ranks() * shard_numel().
  int64_t whole_numel() const { return num_ranks_ * shard_numel_; }
  int64_t padding_numel() const { return whole_numel() - parameters_numel_; }

  // REQUIRES of all below: parameter < parameters().size().

  // In the gathered buffer, where the parameter lies in one piece.
  int64_t offset(size_t parameter) const { return offsets_[parameter]; }

  // REQUIRES: 0 <= rank < num_ranks().
  ShardRange range(size_t parameter, int64_t rank) const;

  // The ranks that hold some of it; empty, at 0, if it has no elements.
  RankRange owners(size_t parameter) const;

  // Equal for layouts that are equal, in every process of the same build.
  uint64_t fingerprint() const;

  friend bool operator==(const ShardLayout&, const ShardLayout&) = default;

 private:
  ShardLayout(std::vector<ShardSpec> parameters, int64_t num_ranks,
              int64_t shard_numel, std::vector<int64_t> offsets);

  std::vector<ShardSpec> parameters_;
  std::vector<int64_t> offsets_;  // by parameter
  int64_t num_ranks_;
  int64_t shard_numel_;
  int64_t parameters_numel_;
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_SHARD_LAYOUT_H_
