#include "brigade/fsdp/layout/shard_layout.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "brigade/fsdp/layout/digest.h"
#include "brigade/fsdp/layout/shard_numel.h"

namespace brigade {
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
