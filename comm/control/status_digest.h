// The statuses of several ranks in one: whether they agree, and if not,
// whose failure is to be told first.
//
// Thread safety: values and pure functions.

#ifndef BRIGADE_COMM_CONTROL_STATUS_DIGEST_H_
#define BRIGADE_COMM_CONTROL_STATUS_DIGEST_H_

#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>

#include "brigade/comm/control/rank_status.h"

namespace brigade {

// A status and the rank that has sent it.
struct StatusOf {
  int64_t rank = 0;
  RankStatus rank_status = {};
};

// What agreeing ranks may have told otherwise: whether all have told the same.
struct ToldAlike {
  bool proposals = true;
  bool orders = true;
};

// Travels as it lies in memory.
struct StatusDigest {
  // Of the lowest rank that has failed; else of the lowest rank.
  StatusOf first = {};
  int32_t all_agree = 1;  // check_statuses() of all is OK
  int16_t has_one_proposal = 1;
  int16_t has_one_order = 1;
};

static_assert(sizeof(StatusDigest) == 336);
static_assert(std::is_trivially_copyable_v<StatusDigest>);

StatusDigest digest_of(int rank, const RankStatus& rank_status);

// Order and repetition don't matter.
StatusDigest combine(const StatusDigest& a, const StatusDigest& b);

// REQUIRES: all agree.
ToldAlike told_alike(const StatusDigest& digest);

// That of which a failure is told, if any rank has failed.
std::optional<StatusOf> first_failure(const StatusDigest& digest);

// "rank 3 failed in iteration 7: bad input"
std::string describe(const StatusOf& told);

}  // namespace brigade

#endif  // BRIGADE_COMM_CONTROL_STATUS_DIGEST_H_
