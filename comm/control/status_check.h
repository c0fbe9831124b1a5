// What follows from the statuses of all ranks: whether they are in the same
// place, and what each has to launch to get there.
//
// Every rank holds the same statuses after an exchange, and so comes to the
// same result, word for word.
//
// Thread safety: pure functions.

#ifndef BRIGADE_COMM_CONTROL_STATUS_CHECK_H_
#define BRIGADE_COMM_CONTROL_STATUS_CHECK_H_

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "brigade/comm/control/rank_status.h"

namespace brigade {

// OK if no rank has failed, and kind, iteration, unit, fingerprint, launches
// on each group and `others` are equal on all ranks, and of kFollowUp how many
// other collectives the group of all ranks has launched.
//
// Errors: Aborted if ranks have failed: which, where, with what words.
// FailedPrecondition for the first of the above that differs: what was
// expected, and what each rank has.
absl::Status check_statuses(std::span<const RankStatus> by_rank);

// Whether check_statuses() is OK with these two; it is with any number of
// ranks if it is with each two of them.
bool agree(const RankStatus& a, const RankStatus& b);

// Units that ranks want from all, each once, in rising order: if any does, none
// has failed, and all would give the same (`proposal`; at the end of an
// iteration it is what they have begun it with). Else none.
std::vector<int64_t> wanted_units(std::span<const RankStatus> by_rank);

// Whether the sender is about to use a unit that it has no more.
inline bool wants_unit(const RankStatus& rank_status) {
  return rank_status.kind == StatusKind::kAsk && rank_status.unit >= 0;
}

// Launches that are missing, by group.
using LaunchDeficit = std::array<int32_t, kMaxGroups>;

// How often `rank` has to launch on zeros to stand where the ranks that
// launched most on each group stand. To be launched, on every rank that misses
// any, before anything else is launched on these groups.
//
// A rank's launches on a group are compared with those of all ranks, though
// only some may be in that group with it: all others then have as many groups
// of the same number, on which they launch the same.
//
// Errors: FailedPrecondition, on every rank alike, if some rank's deficit can't
// be launched: it has aborted the group; ranks have different plans; or the
// group has launched collectives that are not the senders', and not equally
// many on every rank, an opening that one lacks aside, so that zeros would meet
// another collective.
absl::StatusOr<LaunchDeficit> launch_deficit(
    std::span<const RankStatus> by_rank, int rank);

// Of openings that others have launched and `rank` has not, which it has to
// launch before its deficit: none, if all groups' other collectives are equally
// many, or differ by more than that. The same for all that lack one.
OpeningTold lacked_opening(std::span<const RankStatus> by_rank, int rank);

}  // namespace brigade

#endif  // BRIGADE_COMM_CONTROL_STATUS_CHECK_H_
