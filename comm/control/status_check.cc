#include "brigade/comm/control/status_check.h"

#include <algorithm>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "brigade/comm/errors/ranks_by_value.h"

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

// Behind what is told of one group; that of all ranks needs no word.
std::string on_group(size_t group) {
  return group == 0 ? "" : absl::StrCat(" on group ", group);
}

std::vector<int32_t> launches_on(size_t group,
                                 std::span<const RankStatus> by_rank) {
  return by_rank_of(by_rank, [group](const RankStatus& s) {
    return s.by_group[group].launches;
  });
}

bool has_aborted_a_group(const RankStatus& rank_status) {
  return std::ranges::any_of(rank_status.by_group,
                             [](const GroupCounts& counts) {
                               return counts.launches == kAbortedGroup;
                             });
}

// The most that one of the ranks has, and how much less than that each has.
std::vector<int32_t> shortfalls(const std::vector<int32_t>& counts) {
  const int32_t most = *std::max_element(counts.begin(), counts.end());
  std::vector<int32_t> missing;
  for (const int32_t count : counts) missing.push_back(most - count);
  return missing;
}

std::string describe_shortfalls(size_t group,
                                const std::vector<int32_t>& missing) {
  return absl::StrCat("behind by ", absl::StrJoin(missing, ", "),
                      " launches (by rank)", on_group(group));
}

// An opening that some lack is all that tells that they stand apart there.
int32_t foreign_in_follow_up(const RankStatus& rank_status) {
  return rank_status.kind == StatusKind::kFollowUp
             ? rank_status.by_group[0].foreign
             : 0;
}

std::vector<int32_t> foreign_on(size_t group,
                                std::span<const RankStatus> by_rank) {
  return by_rank_of(by_rank, [group](const RankStatus& s) {
    return s.by_group[group].foreign;
  });
}

// OK if all ranks have launched equally many collectives on the group that are
// no senders', as far as groups count them.
absl::Status check_foreign(size_t group, std::span<const RankStatus> by_rank,
                           const std::vector<int32_t>& missing) {
  const std::vector<int32_t> foreign = foreign_on(group, by_rank);
  if (std::ranges::count(foreign, kUnknownCount) > 0 || all_equal(foreign)) {
    return absl::OkStatus();
  }
  if (group == 0) {
    std::vector<int32_t> with_openings;
    for (size_t r = 0; r < by_rank.size(); ++r) {
      with_openings.push_back(
          foreign[r] +
          lacked_opening(by_rank, static_cast<int>(r)).num_collectives);
    }
    if (all_equal(with_openings)) return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "ranks can't be brought in step: ", describe_shortfalls(group, missing),
      ", but in between the group has launched ", absl::StrJoin(foreign, ", "),
      " other collectives (by rank).\nMake a new process group on all "
      "ranks."));
}

}  // namespace

absl::Status check_statuses(std::span<const RankStatus> by_rank) {
  const auto failures =
      by_rank_of(by_rank, [](const RankStatus& s) -> std::string {
        return s.kind == StatusKind::kFailed ? describe_status(s) : "";
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
        describe_deeds(by_rank_of(by_rank, describe_status), ", "),
        ".\nRun forward and backward equally often on every rank, and forwards "
        "without backward under no_grad."));
  }
  const std::string iteration = absl::StrCat("iteration ", first.iteration);
  const auto fingerprints =
      by_rank_of(by_rank, [](const RankStatus& s) { return s.fingerprint; });
  const auto deeds = by_rank_of(by_rank, [](const RankStatus& s) {
    return s.kind == StatusKind::kAsk ? std::string(words_of(s.text)) : "";
  });
  if (!all_equal(fingerprints) && !all_equal(deeds)) {
    return absl::FailedPreconditionError(
        absl::StrCat("expected the same of every rank behind ", iteration, ": ",
                     describe_deeds(deeds, ", "),
                     ".\nCall the same on all ranks, in the same order."));
  }
  if (!all_equal(fingerprints)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "expected the same plan and options on every rank in ", iteration, ": ",
        describe_by_value(by_rank_of(by_rank, describe_fingerprint)),
        ".\nGive every rank the same options."));
  }
  if (!all_equal(by_rank_of(by_rank, foreign_in_follow_up))) {
    return absl::FailedPreconditionError(absl::StrCat(
        "expected equally many other collectives of the group on every rank "
        "behind a failure: ",
        describe_by_value(by_rank_of(by_rank, foreign_in_follow_up)),
        ".\nCatch the error on every rank."));
  }
  for (size_t group = 0; group < kMaxGroups; ++group) {
    const auto launches = launches_on(group, by_rank);
    if (all_equal(launches)) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "expected the same number of launches on every rank in ", iteration,
        ": ", describe_by_value(launches), on_group(group),
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
    return std::tuple(s.kind, s.iteration, s.unit, s.fingerprint, s.others,
                      foreign_in_follow_up(s));
  };
  const auto same_launches = [](const GroupCounts& x, const GroupCounts& y) {
    return x.launches == y.launches;
  };
  return a.kind != StatusKind::kFailed && compared(a) == compared(b) &&
         std::ranges::equal(a.by_group, b.by_group, same_launches);
}

std::vector<int64_t> wanted_units(std::span<const RankStatus> by_rank) {
  std::set<int64_t> wanted;
  std::set<uint64_t> given;
  for (const RankStatus& rank_status : by_rank) {
    if (rank_status.kind == StatusKind::kFailed) return {};
    if (wants_unit(rank_status)) wanted.insert(rank_status.unit);
    if (rank_status.kind != StatusKind::kEnd)
      given.insert(rank_status.proposal);
  }
  if (given.size() > 1) return {};
  return {wanted.begin(), wanted.end()};
}

absl::StatusOr<LaunchDeficit> launch_deficit(
    std::span<const RankStatus> by_rank, int rank) {
  std::vector<int> lost;
  for (size_t r = 0; r < by_rank.size(); ++r) {
    if (has_aborted_a_group(by_rank[r])) lost.push_back(static_cast<int>(r));
  }
  if (!lost.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("ranks can't be brought in step: ", describe_ranks(lost),
                     " can't go on with the group.\nMake a new process group "
                     "on all ranks."));
  }
  const bool one_plan = all_equal(
      by_rank_of(by_rank, [](const auto& s) { return s.fingerprint; }));
  LaunchDeficit deficit = {};
  for (size_t group = 0; group < kMaxGroups; ++group) {
    const std::vector<int32_t> missing =
        shortfalls(launches_on(group, by_rank));
    if (auto status = check_foreign(group, by_rank, missing); !status.ok()) {
      return status;
    }
    if (!one_plan && !all_equal(missing)) {
      return absl::FailedPreconditionError(
          absl::StrCat("ranks can't be brought in step: ",
                       describe_shortfalls(group, missing),
                       ", of different plans.\nMake a new process group on all "
                       "ranks."));
    }
    deficit[group] = missing[rank];
  }
  return deficit;
}

OpeningTold lacked_opening(std::span<const RankStatus> by_rank, int rank) {
  const std::vector<int32_t> foreign = foreign_on(/*group=*/0, by_rank);
  const auto told = std::ranges::find_if(by_rank, [](const RankStatus& s) {
    return s.opening.num_collectives > 0;
  });
  if (told == by_rank.end() || by_rank[rank].opening.num_collectives > 0 ||
      std::ranges::count(foreign, kUnknownCount) > 0) {
    return {};
  }
  const int32_t missing = std::ranges::max(foreign) - foreign[rank];
  return missing == told->opening.num_collectives ? told->opening
                                                  : OpeningTold{};
}

}  // namespace brigade
