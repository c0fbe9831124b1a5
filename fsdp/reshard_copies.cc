#include "brigade/fsdp/reshard_copies.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace brigade {
namespace {

absl::Status check_parameters(const ShardLayout& from, const ShardLayout& to) {
  if (from.parameters().size() != to.parameters().size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "cannot reshard ", from.parameters().size(), " parameters into ",
        to.parameters().size(), "; both layouts must be of one unit"));
  }
  for (size_t p = 0; p < from.parameters().size(); ++p) {
    if (from.parameters()[p].numel != to.parameters()[p].numel) {
      return absl::InvalidArgumentError(absl::StrCat(
          "cannot reshard parameter ", p, " of ", from.parameters()[p].numel,
          " elements into one of ", to.parameters()[p].numel,
          "; both layouts must be of one unit"));
    }
  }
  return absl::OkStatus();
}

// Where an element of the gathered buffer lies, and how many follow it there.
struct Place {
  Place(const ShardLayout& layout, int64_t position)
      : rank(position / layout.shard_numel()),
        offset(position % layout.shard_numel()),
        room(layout.shard_numel() - offset) {}

  int64_t rank;
  int64_t offset;
  int64_t room;
};

}  // namespace

absl::StatusOr<std::vector<ReshardCopy>> reshard_copies(const ShardLayout& from,
                                                        const ShardLayout& to) {
  if (absl::Status status = check_parameters(from, to); !status.ok()) {
    return status;
  }
  std::vector<ReshardCopy> copies;
  for (size_t p = 0; p < from.parameters().size(); ++p) {
    const int64_t numel = from.parameters()[p].numel;
    for (int64_t done = 0; done < numel; done += copies.back().numel) {
      const Place source(from, from.offset(p) + done);
      const Place target(to, to.offset(p) + done);
      copies.push_back(
          {.parameter = p,
           .from_rank = source.rank,
           .from_offset = source.offset,
           .to_rank = target.rank,
           .to_offset = target.offset,
           .numel = std::min({numel - done, source.room, target.room})});
    }
  }
  return copies;
}

}  // namespace brigade
