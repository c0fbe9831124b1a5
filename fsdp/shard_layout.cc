#include "brigade/fsdp/shard_layout.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <numeric>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "brigade/fsdp/digest.h"

namespace brigade {

namespace {

int64_t ceil_div(int64_t numerator, int64_t denominator) {
  return numerator / denominator + (numerator % denominator != 0);
}

int64_t round_up(int64_t value, int64_t multiple) {
  return ceil_div(value, multiple) * multiple;
}

// Where `parameter` may begin, at or after `begin`; nullopt if its blocks do
// not go into shards of this length at all.
std::optional<int64_t> first_offset(const ShardSpec& parameter, int64_t begin,
                                    int64_t shard_numel) {
  if (parameter.numel == 0) return begin;
  if (shard_numel == 0) return std::nullopt;
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

}  // namespace

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
  if (shard_numel > 0 && ceil_div(end, shard_numel) > num_ranks) {
    return std::nullopt;
  }
  return offsets;
}

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

int64_t choose_shard_numel(std::span<const ShardSpec> parameters,
                           int64_t num_ranks, int64_t alignment) {
  const int64_t least = least_shard_numel(parameters, num_ranks);
  const int64_t aligned = round_up(least, alignment);
  if (place_parameters(parameters, num_ranks, aligned)) return aligned;

  // The longest parameters first: from a shard as long as one on, its blocks
  // need not divide the shard.
  std::vector<ShardSpec> longest;
  std::ranges::copy_if(parameters, std::back_inserter(longest),
                       [](const auto& spec) { return spec.block_numel > 1; });
  std::ranges::sort(longest, std::ranges::greater(), &ShardSpec::numel);
  int64_t found = round_up(std::max(least, longest.front().numel), alignment);
  int64_t multiple = alignment;
  for (size_t i = 0; i < longest.size() && longest[i].numel > least; ++i) {
    const int64_t numel = longest[i].numel;
    const int64_t factor =
        longest[i].block_numel / std::gcd(longest[i].block_numel, multiple);
    // Then the shard is longer than this parameter, which is dealt with.
    if (factor > numel / multiple) break;
    multiple *= factor;
    const int64_t shorter = i + 1 < longest.size() ? longest[i + 1].numel : 0;
    found = std::min(found, round_up(std::max(least, shorter), multiple));
  }
  return found;
}

namespace {

constexpr int64_t kMostNumel = int64_t{1} << 48;

absl::Status validate(std::span<const ShardSpec> parameters, int64_t num_ranks,
                      int64_t alignment) {
  if (parameters.empty()) {
    return absl::InvalidArgumentError(
        "a shard layout needs at least 1 parameter, got 0");
  }
  if (num_ranks < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("a shard layout needs at least 1 rank, got ", num_ranks));
  }
  if (alignment < 1 || alignment > kMostNumel) {
    return absl::InvalidArgumentError(
        absl::StrCat("the alignment of shards must be 1 to ", kMostNumel,
                     " elements, got ", alignment));
  }
  int64_t total = 0;
  for (size_t p = 0; p < parameters.size(); ++p) {
    if (parameters[p].numel < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("parameter ", p,
                       " of a shard layout must have numel >= "
                       "0, got ",
                       parameters[p].numel));
    }
    if (parameters[p].block_numel < 1) {
      return absl::InvalidArgumentError(absl::StrCat(
          "parameter ", p,
          " of a shard layout must have block_numel >= 1, got ",
          parameters[p].block_numel, "; 1 lets it be cut anywhere"));
    }
    if (parameters[p].numel > kMostNumel - total) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the parameters of a shard layout have more than ", kMostNumel,
          " elements up to parameter ", p, "; make several units of them"));
    }
    total += parameters[p].numel;
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ShardLayout> ShardLayout::create(
    std::vector<ShardSpec> parameters, int64_t num_ranks, int64_t alignment) {
  if (absl::Status status = validate(parameters, num_ranks, alignment);
      !status.ok()) {
    return status;
  }
  const int64_t shard_numel = std::max<int64_t>(
      choose_shard_numel(parameters, num_ranks, alignment), alignment);
  if (shard_numel > std::numeric_limits<int64_t>::max() / num_ranks) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a shard layout of ", num_ranks, " ranks with ", shard_numel,
        " elements each is longer than 2^63 - 1; use fewer ranks, a smaller "
        "alignment or smaller blocks"));
  }
  std::vector<int64_t> offsets =
      place_parameters(parameters, num_ranks, shard_numel).value();
  return ShardLayout(std::move(parameters), num_ranks, shard_numel,
                     std::move(offsets));
}

ShardLayout::ShardLayout(std::vector<ShardSpec> parameters, int64_t num_ranks,
                         int64_t shard_numel, std::vector<int64_t> offsets)
    : parameters_(std::move(parameters)),
      offsets_(std::move(offsets)),
      num_ranks_(num_ranks),
      shard_numel_(shard_numel),
      parameters_numel_(total_numel(parameters_)) {}

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

RankRange ShardLayout::owners(size_t parameter) const {
  const int64_t numel = parameters_[parameter].numel;
  if (numel == 0) return {};
  const int64_t offset = offsets_[parameter];
  return {.begin = offset / shard_numel_,
          .end = (offset + numel - 1) / shard_numel_ + 1};
}

uint64_t ShardLayout::fingerprint() const {
  Digest digest;
  digest.add(num_ranks_).add(shard_numel_).add_all(offsets_);
  for (const ShardSpec& parameter : parameters_) {
    digest.add(parameter.numel).add(parameter.block_numel);
  }
  return digest.value();
}

}  // namespace brigade
