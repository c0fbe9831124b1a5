// What follows from the statuses of all ranks: whether they are in the same
// place, and what each has to launch to get there.
//
// Every rank holds the same statuses after an exchange, and so comes to the
// same result, word for word.
//
// Thread safety: pure functions.

#ifndef BRIGADE_COMM_STATUS_CHECK_H_
#define BRIGADE_COMM_STATUS_CHECK_H_

#include <cstdint>
#include <span>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "brigade/comm/rank_status.h"

namespace brigade {

// OK if no rank has failed, and kind, iteration, unit, number of elements,
// fingerprint and launches are equal on all ranks.
//
// Errors: Aborted if ranks have failed: which, where, with what words.
// FailedPrecondition for the first of the above that differs: what was
// expected, and what each rank has.
absl::Status check_statuses(std::span<const RankStatus> by_rank,
                            std::string_view unit_name = "bucket");

// Whether check_statuses() is OK with these two; it is with any number of
// ranks if it is with each two of them.
bool agree(const RankStatus& a, const RankStatus& b);

// How often `rank` has to launch on zeros to stand where the rank that launched
// most stands.  The payment is for the caller to make, on every
// rank that owes one, before anything else is launched on the group.
//
// Errors: FailedPrecondition, on every rank alike, if some rank's debt cannot
// be paid: it has lost the group; ranks have different plans; or the group has
// launched collectives that are not the senders', and not equally many on every
// rank, so that zeros would meet another collective.
absl::StatusOr<int64_t> launch_deficit(std::span<const RankStatus> by_rank,
                                       int rank);

}  // namespace brigade

#endif  // BRIGADE_COMM_STATUS_CHECK_H_
