// Layout of the parameters of a flat shard: which rank holds which elements.
//
// The parameters, one after the other, are cut into F equal shards. A parameter
// is contiguous in the gathered buffer, which holds the shards by rank, so that
// it is a view of it. A rank holds the intersection of a parameter with its
// shard, which may be empty.
//
// A block of a parameter is never cut. So padding may go before a parameter,
// and blocks of a parameter that spans two cuts or more divide the shard.
// Padding is less than F elements with blocks of 1; otherwise less than
// F * (G + L), with G the largest block and L the least common multiple of the
// blocks of parameters that are longer than N/F, for N elements in all.
//
//   const ShardLayout layout({{.numel = 12}, {.numel = 3}}, 16);
//   layout.range(1, 12);  // {.in_parameter = 0, .in_shard = 0, .numel = 1}
//
// Thread safety: immutable.

#ifndef BRIGADE_FSDP_SHARD_LAYOUT_H_
#define BRIGADE_FSDP_SHARD_LAYOUT_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace brigade {

struct ShardSpec {
  int64_t numel = 0;        // may be 0
  int64_t block_numel = 1;  // elements that stay together, counted from the
                            // parameter's first; the last block may be shorter
};

// The elements of one parameter that one rank holds; all 0 if there are none.
struct ShardRange {
  int64_t in_parameter = 0;  // offset of the first
  int64_t in_shard = 0;
  int64_t numel = 0;

  friend bool operator==(const ShardRange&, const ShardRange&) = default;
};

class ShardLayout {
 public:
  // REQUIRES: at least one parameter, at most 2^48 elements in all, and blocks
  // and ranks >= 1.
  ShardLayout(std::vector<ShardSpec> parameters, int64_t num_ranks);

  const std::vector<ShardSpec>& parameters() const { return parameters_; }
  int64_t num_ranks() const { return num_ranks_; }
  int64_t shard_numel() const { return shard_numel_; }  // on every rank
  // Of the gathered buffer.
  int64_t whole_numel() const { return num_ranks_ * shard_numel_; }
  int64_t padding_numel() const;

  // Of the parameter in the gathered buffer.
  int64_t offset(size_t parameter) const { return offsets_[parameter]; }
  ShardRange range(size_t parameter, int64_t rank) const;

 private:
  const std::vector<ShardSpec> parameters_;
  const int64_t num_ranks_;
  const int64_t shard_numel_;
  const std::vector<int64_t> offsets_;  // by parameter
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_SHARD_LAYOUT_H_
