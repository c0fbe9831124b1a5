#include "brigade/comm/status_check.h"

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "brigade/comm/ranks_by_value.h"

namespace brigade {
namespace {

template <typename F>
auto by_rank_of(std::span<const RankStatus> by_rank, F part) {
  std::vector<decltype(part(by_rank.front()))> parts;
  for (const RankStatus& rank_status : by_rank) {
    parts.push_back(part(rank_status));
  }
  return parts;
}

template <typename T>
bool all_equal(const std::vector<T>& parts) {
  return std::all_of(parts.begin(), parts.end(),
                     [&](const T& part) { return part == parts.front(); });
}

// "rank 0 ended iteration 7, ranks 1, 2 began iteration 8"
std::string describe_deeds(const std::vector<std::string>& deeds,
                           std::string_view separator) {
  std::vector<std::string> parts;
  for (const RanksOfValue<std::string>& group : ranks_by_value(deeds)) {
    if (group.value.empty()) continue;
    parts.push_back(
        absl::StrCat(describe_ranks(group.ranks), " ", group.value));
  }
  return absl::StrJoin(parts, std::string(separator));
}

std::string describe_fingerprint(const RankStatus& rank_status) {
  const std::string words(words_of(rank_status.text));
  return absl::StrFormat("%016x%s%s%s", rank_status.fingerprint,
                         words.empty() ? "" : " (", words,
                         words.empty() ? "" : ")");
}

// The most that one of the ranks has, and how much less than that each has.
std::vector<int64_t> shortfalls(const std::vector<int64_t>& counts) {
  const int64_t most = *std::max_element(counts.begin(), counts.end());
  std::vector<int64_t> missing;
  for (const int64_t count : counts) missing.push_back(most - count);
  return missing;
}

}  // namespace

absl::Status check_statuses(std::span<const RankStatus> by_rank,
                            std::string_view unit_name) {
  const auto describe = [&](const RankStatus& rank_status) {
    return describe_status(rank_status, unit_name);
  };
  const auto failures =
      by_rank_of(by_rank, [&](const RankStatus& s) -> std::string {
        return s.kind == StatusKind::kFailed ? describe(s) : "";
      });
  if (std::string text = describe_deeds(failures, "\n"); !text.empty()) {
    return absl::AbortedError(text);
  }

  const RankStatus& first = by_rank.front();
  const auto places = by_rank_of(by_rank, [](const RankStatus& s) {
    return std::tuple(s.kind, s.iteration, s.unit);
  });
  if (!all_equal(places)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "expected every rank in the same place: ",
        describe_deeds(by_rank_of(by_rank, describe), ", "),
        ".\nRun forward and backward equally often on every rank, and forwards "
        "without backward under no_grad."));
  }
  const std::string iteration = absl::StrCat("iteration ", first.iteration);
  const auto numels =
      by_rank_of(by_rank, [](const RankStatus& s) { return s.numel; });
  if (!all_equal(numels)) {
    const std::string unit =
        first.unit < 0 ? "the collective"
                       : absl::StrCat(std::string(unit_name), " ", first.unit);
    return absl::FailedPreconditionError(
        absl::StrCat("expected ", unit, " of ", iteration,
                     " to have the same number of elements on every rank: ",
                     describe_by_value(numels),
                     ".\nMake it a function of what all ranks know."));
  }
  const auto fingerprints =
      by_rank_of(by_rank, [](const RankStatus& s) { return s.fingerprint; });
  if (!all_equal(fingerprints)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "expected the same plan and options on every rank in ", iteration, ": ",
        describe_by_value(by_rank_of(by_rank, describe_fingerprint)),
        ".\nGive every rank the same options."));
  }
  const auto launches =
      by_rank_of(by_rank, [](const RankStatus& s) { return s.launches; });
  if (!all_equal(launches)) {
    return absl::FailedPreconditionError(
        absl::StrCat("expected the same number of launches on every rank in ",
                     iteration, ": ", describe_by_value(launches),
                     ".\nLaunch equally often on every rank."));
  }
  const auto others =
      by_rank_of(by_rank, [](const RankStatus& s) { return s.others; });
  if (!all_equal(others)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "expected the group's other collectives at the same places between "
        "those of ",
        iteration,
        " on every rank, they were not; results may be wrong.\nIf comm hook ",
        std::string(words_of(first.text)),
        " launches collectives in a continuation of its future, let it do so "
        "by then_collective()."));
  }
  return absl::OkStatus();
}

bool agree(const RankStatus& a, const RankStatus& b) {
  const auto compared = [](const RankStatus& s) {
    return std::tuple(s.kind, s.iteration, s.unit, s.numel, s.fingerprint,
                      s.launches, s.others);
  };
  return a.kind != StatusKind::kFailed && compared(a) == compared(b);
}

absl::StatusOr<int64_t> launch_deficit(std::span<const RankStatus> by_rank,
                                       int rank) {
  std::vector<int> lost;
  for (size_t r = 0; r < by_rank.size(); ++r) {
    if (by_rank[r].launches == kLostGroup) lost.push_back(static_cast<int>(r));
  }
  if (!lost.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("ranks can't be brought in step: ", describe_ranks(lost),
                     " can't go on with the group.\nMake a new process group "
                     "on all ranks."));
  }
  const std::vector<int64_t> owed = shortfalls(
      by_rank_of(by_rank, [](const RankStatus& s) { return s.launches; }));
  const bool known = std::none_of(
      by_rank.begin(), by_rank.end(),
      [](const RankStatus& s) { return s.group_launches == kUnknownCount; });
  const auto foreign = by_rank_of(by_rank, [known](const RankStatus& s) {
    return known ? s.group_launches - s.own_collectives : 0;
  });
  if (!all_equal(foreign)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "ranks can't be brought in step: behind by ", absl::StrJoin(owed, ", "),
        " launches (by rank), but in between the group has launched ",
        absl::StrJoin(foreign, ", "),
        " other collectives (by rank).\nMake a new process group on all "
        "ranks."));
  }
  const bool one_plan = all_equal(
      by_rank_of(by_rank, [](const auto& s) { return s.fingerprint; }));
  if (!one_plan && !all_equal(owed)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "ranks can't be brought in step: behind by ", absl::StrJoin(owed, ", "),
        " launches (by rank), of different plans.\nMake a new process group on "
        "all ranks."));
  }
  return owed[rank];
}

}  // namespace brigade
