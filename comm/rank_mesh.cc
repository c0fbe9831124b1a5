#include "brigade/comm/rank_mesh.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "brigade/comm/agreement.h"
#include "brigade/comm/group/control_device.h"
#include "brigade/comm/subgroup.h"

namespace brigade {
namespace {

using Rows = std::vector<std::vector<int>>;

std::string describe(const Rows& rows) {
  return absl::StrJoin(rows, ", ", [](std::string* out, const auto& row) {
    absl::StrAppend(out, "[", absl::StrJoin(row, ", "), "]");
  });
}

std::vector<int> flattened(const Rows& rows) {
  std::vector<int> ranks;
  for (const auto& row : rows)
    ranks.insert(ranks.end(), row.begin(), row.end());
  return ranks;
}

absl::Status check(const Rows& rows, int num_ranks) {
  std::vector<int> ranks = flattened(rows);
  std::ranges::sort(ranks);
  bool is_whole = static_cast<int>(ranks.size()) == num_ranks;
  for (int rank = 0; is_whole && rank < num_ranks; ++rank) {
    is_whole = ranks[rank] == rank;
  }
  const bool is_even = std::ranges::all_of(
      rows, [&](const auto& row) { return row.size() == rows.front().size(); });
  if (is_whole && is_even) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "mesh: expected rows of one length with each of the ", num_ranks,
      " ranks of the group once, found ", describe(rows),
      ".\nFor some of the ranks give a group of theirs (make_subgroup())."));
}

}  // namespace

RankMesh::RankMesh(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                   const std::vector<std::vector<int>>& rows,
                   c10::Device device)
    : group_(group) {
  TORCH_CHECK_VALUE(group,
                    "mesh: the process group is null.\nGive that of "
                    "init_process_group().");
  suggest_control_device(group, device);
  const std::vector<std::string> described = {describe(rows)};
  require_agreement(group, control_device(*group), "mesh", described,
                    check(rows, group->getSize()));
  row_length_ = static_cast<int>(rows.front().size());
  const std::vector<int> ranks = flattened(rows);
  if (std::ranges::is_sorted(ranks)) return;
  made_.reset(new GroupScope(make_subgroup(group, ranks, device)));
  group_ = made_->group();
}

}  // namespace brigade
