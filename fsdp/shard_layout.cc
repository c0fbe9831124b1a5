#include "brigade/fsdp/shard_layout.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <optional>
#include <span>
#include <utility>

namespace brigade {
namespace {

int64_t ceil_div(int64_t numerator, int64_t denominator) {
  return numerator / denominator + (numerator % denominator != 0);
}

// Where `parameter` may begin, at or after `begin`; nullopt if its blocks do
// not go into shards of this length at all.
std::optional<int64_t> first_offset(const ShardSpec& parameter, int64_t begin,
                                    int64_t shard_numel) {
  if (parameter.numel == 0) return begin;
  const int64_t cut = (begin / shard_numel + 1) * shard_numel;
  // In what is left of this shard, or else in a fresh one. A later beginning
  // in the same shard would only push more of it beyond the next cut.
  for (const auto& [room, end] : {std::pair(cut - begin, cut),
                                  std::pair(shard_numel, cut + shard_numel)}) {
    if (parameter.numel <= room) return end - room;
    const int64_t head = room - room % parameter.block_numel;
    const bool one_cut = parameter.numel - head <= shard_numel;
    if (head > 0 && (one_cut || shard_numel % parameter.block_numel == 0)) {
      return end - head;
    }
  }
  return std::nullopt;
}

// Whether the blocks go into the shards in order, each whole, where a parameter
// may have holes at the cuts.
bool blocks_fit(std::span<const ShardSpec> parameters, int64_t num_ranks,
                int64_t shard_numel) {
  int64_t shards_left = num_ranks;
  int64_t room = 0;
  for (const ShardSpec& parameter : parameters) {
    int64_t left = parameter.numel;
    if (left <= room) {
      room -= left;
      continue;
    }
    left -= room - room % parameter.block_numel;
    const int64_t per_shard = shard_numel - shard_numel % parameter.block_numel;
    int64_t shards = 1;
    if (left > shard_numel) {
      if (per_shard == 0) return false;
      shards += ceil_div(left - shard_numel, per_shard);
    }
    if (shards > shards_left) return false;
    shards_left -= shards;
    room = shard_numel - (left - (shards - 1) * per_shard);
  }
  return true;
}

// Offsets of the parameters in the gathered buffer, each the least that cuts no
// block and follows the parameter before; nullopt if they do not fit. No other
// offsets fit then: the earlier a parameter ends, the earlier may the next one
// begin.
std::optional<std::vector<int64_t>> place_parameters(
    std::span<const ShardSpec> parameters, int64_t num_ranks,
    int64_t shard_numel) {
  std::vector<int64_t> offsets;
  offsets.reserve(parameters.size());
  int64_t end = 0;
  for (const ShardSpec& parameter : parameters) {
    const auto offset = first_offset(parameter, end, shard_numel);
    if (!offset) return std::nullopt;
    offsets.push_back(*offset);
    end = *offset + parameter.numel;
  }
  if (ceil_div(end, shard_numel) > num_ranks) return std::nullopt;
  return offsets;
}

int64_t total_numel(std::span<const ShardSpec> parameters) {
  int64_t total = 0;
  for (const ShardSpec& parameter : parameters) total += parameter.numel;
  return total;
}

// The least number of elements per rank that holds the blocks in order, if a
// parameter might have holes: no layout has shorter shards.
int64_t least_shard_numel(std::span<const ShardSpec> parameters,
                          int64_t num_ranks) {
  const int64_t total = total_numel(parameters);
  int64_t low = ceil_div(total, num_ranks);
  int64_t high = total;  // all on one rank
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (blocks_fit(parameters, num_ranks, middle)) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// least_shard_numel() if the parameters fit, which they do with blocks of 1
// element; else the least length from there on that the blocks of all
// parameters longer than itself divide.
int64_t choose_shard_numel(std::span<const ShardSpec> parameters,
                           int64_t num_ranks) {
  const int64_t least =
      std::max<int64_t>(least_shard_numel(parameters, num_ranks), 1);
  if (place_parameters(parameters, num_ranks, least)) return least;

  // The longest parameters first: from a shard as long as one on, its blocks
  // need not divide the shard.
  std::vector<ShardSpec> longest;
  std::ranges::copy_if(parameters, std::back_inserter(longest),
                       [](const auto& spec) { return spec.block_numel > 1; });
  std::ranges::sort(longest, std::ranges::greater(), &ShardSpec::numel);
  int64_t found = std::max(least, longest.front().numel);
  int64_t multiple = 1;
  for (size_t i = 0; i < longest.size() && longest[i].numel > least; ++i) {
    const int64_t numel = longest[i].numel;
    const int64_t factor =
        longest[i].block_numel / std::gcd(longest[i].block_numel, multiple);
    // Then the shard is longer than this parameter, which is dealt with.
    if (factor > numel / multiple) break;
    multiple *= factor;
    const int64_t shorter = i + 1 < longest.size() ? longest[i + 1].numel : 0;
    found = std::min(found,
                     ceil_div(std::max(least, shorter), multiple) * multiple);
  }
  return found;
}

}  // namespace

ShardLayout::ShardLayout(std::vector<ShardSpec> parameters, int64_t num_ranks)
    : parameters_(std::move(parameters)),
      num_ranks_(num_ranks),
      shard_numel_(choose_shard_numel(parameters_, num_ranks)),
      offsets_(place_parameters(parameters_, num_ranks, shard_numel_).value()) {
}

int64_t ShardLayout::padding_numel() const {
  return whole_numel() - total_numel(parameters_);
}

ShardRange ShardLayout::range(size_t parameter, int64_t rank) const {
  const int64_t offset = offsets_[parameter];
  const int64_t shard_begin = rank * shard_numel_;
  const int64_t begin = std::max(offset, shard_begin);
  const int64_t end = std::min(offset + parameters_[parameter].numel,
                               shard_begin + shard_numel_);
  if (begin >= end) return {};
  return {.in_parameter = begin - offset,
          .in_shard = begin - shard_begin,
          .numel = end - begin};
}

}  // namespace brigade
