#include "brigade/fsdp/shard_layout.h"

#include <algorithm>
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

// The least multiple of `multiple` that holds the parameters, from their
// average on; by bisection, so that holes may hide a shorter one.
int64_t least_multiple(std::span<const ShardSpec> parameters, int64_t num_ranks,
                       int64_t multiple) {
  const int64_t total = std::max<int64_t>(total_numel(parameters), 1);
  int64_t low = ceil_div(ceil_div(total, num_ranks), multiple);
  int64_t high = ceil_div(total, multiple);  // all on one rank
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (place_parameters(parameters, num_ranks, middle * multiple)) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return high * multiple;
}

// The shortest shard whose length is a multiple of the blocks of the longest
// parameters, of however many: shorter parameters are cut once at most, so that
// their blocks need not divide it.
int64_t choose_shard_numel(std::span<const ShardSpec> parameters,
                           int64_t num_ranks) {
  int64_t found = least_multiple(parameters, num_ranks, 1);
  std::vector<ShardSpec> longest(parameters.begin(), parameters.end());
  std::ranges::sort(longest, std::ranges::greater(), &ShardSpec::numel);
  int64_t multiple = 1;
  for (const ShardSpec& parameter : longest) {
    const int64_t block = std::min(parameter.block_numel, parameter.numel);
    if (block == 0 || multiple % block == 0) continue;
    const int64_t factor = block / std::gcd(block, multiple);
    if (factor > found / multiple) break;
    multiple *= factor;
    found = std::min(found, least_multiple(parameters, num_ranks, multiple));
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
