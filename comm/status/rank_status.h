// Status of one rank in an iteration: a fixed-size record that ranks exchange,
// and the comparison of all ranks' records.
//
//   RankStatus end = {.kind = StatusKind::kEnd, .iteration = 7};
//   std::vector<RankStatus> by_rank = channel.await(channel.exchange(end));
//   absl::Status all_agree = check_statuses(by_rank);
//
// Thread safety: values and pure functions.

#ifndef BRIGADE_COMM_STATUS_RANK_STATUS_H_
#define BRIGADE_COMM_STATUS_RANK_STATUS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"

namespace brigade {

enum class StatusKind : int32_t {
  kBegin,    // begins an iteration
  kAsk,      // begins the action in `text`, if all ranks do
  kEnd,      // launched all collectives of the iteration
  kChained,  // launched the second collectives (then_collective())
  kArrived,  // has all results
  kFailed,   // aborted the iteration
};

// Zero-terminated unless full.
using StatusText = std::array<char, 192>;

// Sent as bytes: ranks run the same build on the same architecture.
struct RankStatus {
  StatusKind kind = StatusKind::kBegin;
  int32_t cannot_continue = 0;  // 1: the sender can launch nothing more
  // 1: the program's own collectives lie between those of an iteration.
  int32_t has_others = 0;
  // 1: if ranks disagree, the sender launches zeros for the collectives of the
  // iteration that only its peers have launched.
  int32_t launches_later = 0;
  int32_t hook_at = 0;    // kBegin: the comm hook's name in `text`; 0: none
  int64_t sequence = 0;   // number of the exchange; set by the channel
  int64_t iteration = 0;  // or iteration_of() a segment (error_texts.h)
  // kFailed: the bucket or unit that failed. In a segment of sharded training:
  // the unit that the sender needs, or the action that begins. -1: none.
  int64_t unit = -1;
  uint64_t fingerprint = 0;  // of plan and options
  uint64_t launched = 0;     // kFailed: hash of the iteration's launches so far

  // Hash of the positions of the program's own collectives in the iteration; 0:
  // not compared.
  uint64_t others = 0;

  // For segments of sharded training (fsdp/segment_exchange.h); not compared.
  uint64_t proposal = 0;
  uint64_t order = 0;

  StatusText text = {};  // an error, or a description of the fingerprint
};

static_assert(std::is_trivially_copyable_v<RankStatus>);

// Copies `words` without a Python stack. Longer texts are cut after a line, or
// between UTF-8 characters and then end in "...".
StatusText status_text(std::string_view words);
std::string_view words_of(const StatusText& text);

// Predicate for "rank 3 ...": "ended iteration 7", "failed in iteration 7 at
// launch 2: division by zero".
std::string describe_status(const RankStatus& rank_status);

// The error of ranks that wait for `rank`.
std::string describe_leaver(int rank, int64_t iteration);

// Returns OK if no rank has failed and kind, iteration, unit, fingerprint and
// `others` are equal on all ranks. Otherwise returns the same text on every
// rank. Aborted: the failed ranks, the place and text of each failure.
// FailedPrecondition: the first field that differs, and each rank's value.
// `remedy`: for ranks in different places.
absl::Status check_statuses(
    std::span<const RankStatus> by_rank,
    const char* remedy =
        "Run the same number of forwards and backwards on every rank, and "
        "forwards without backward under no_grad.");

// Returns true if the groups are unusable after statuses that disagree. A rank
// can't continue, zeros would match the program's own collectives, or a rank
// has launched an iteration that has another plan elsewhere.
bool must_close_groups(std::span<const RankStatus> by_rank);

}  // namespace brigade

#endif  // BRIGADE_COMM_STATUS_RANK_STATUS_H_
