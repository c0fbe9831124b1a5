#include "brigade/comm/control/status_digest.h"

#include <tuple>

#include "absl/strings/str_cat.h"
#include "brigade/comm/control/status_check.h"

namespace brigade {
namespace {

bool has_failed(const StatusOf& told) {
  return told.rank_status.kind == StatusKind::kFailed;
}

}  // namespace

StatusDigest digest_of(int rank, const RankStatus& rank_status) {
  const StatusOf first = {.rank = rank, .rank_status = rank_status};
  return {.first = first, .all_agree = has_failed(first) ? 0 : 1};
}

StatusDigest combine(const StatusDigest& a, const StatusDigest& b) {
  const auto place = [](const StatusDigest& digest) {
    return std::tuple(!has_failed(digest.first), digest.first.rank);
  };
  return {
      .first = place(b) < place(a) ? b.first : a.first,
      .all_agree = a.all_agree != 0 && b.all_agree != 0 &&
                   agree(a.first.rank_status, b.first.rank_status),
      .has_one_proposal =
          a.has_one_proposal != 0 && b.has_one_proposal != 0 &&
          a.first.rank_status.proposal == b.first.rank_status.proposal,
      .has_one_order = a.has_one_order != 0 && b.has_one_order != 0 &&
                       a.first.rank_status.order == b.first.rank_status.order};
}

ToldAlike told_alike(const StatusDigest& digest) {
  return {.proposals = digest.has_one_proposal != 0,
          .orders = digest.has_one_order != 0};
}

std::optional<StatusOf> first_failure(const StatusDigest& digest) {
  if (!has_failed(digest.first)) return std::nullopt;
  return digest.first;
}

std::string describe(const StatusOf& told) {
  return absl::StrCat("rank ", told.rank, " ",
                      describe_status(told.rank_status));
}

}  // namespace brigade
