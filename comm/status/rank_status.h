// A fixed-size record in which a rank tells the others how an iteration goes on
// it, and the comparison of the records of all ranks.
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
  kAsk,      // is about to do what `text` says, if all ranks are
  kEnd,      // has launched all collectives of the iteration
  kChained,  // has launched the second ones after them (then_collective())
  kArrived,  // has their results
  kFailed,   // has aborted the iteration
};

// Zero-terminated unless full.
using StatusText = std::array<char, 192>;

// Travels as bytes: ranks run the same build on the same architecture.
struct RankStatus {
  StatusKind kind = StatusKind::kBegin;
  int32_t cannot_continue = 0;  // 1: the sender can launch nothing more
  // 1: the sender has seen other collectives between those of an iteration.
  int32_t has_others = 0;
  // 1: unless ranks agree, the sender launches zeros for what peers have
  // launched of the iteration and it has not.
  int32_t launches_later = 0;
  int64_t sequence = 0;  // number of the exchange; set by the channel
  int64_t iteration = 0;
  // kFailed: the bucket or unit where it failed. Of a segment of sharded
  // training: the unit that the sender needs, or what begins. -1: none.
  int64_t unit = -1;
  uint64_t fingerprint = 0;  // of plan and options
  uint64_t launched = 0;  // kFailed: hash of what was launched of the iteration

  // Hash of where other collectives lie between those of the iteration; 0: not
  // compared.
  uint64_t others = 0;

  // Of a segment of sharded training (fsdp/segment_exchange.h); not compared.
  uint64_t proposal = 0;
  uint64_t order = 0;

  StatusText text = {};  // an error, or a description of the fingerprint
};

static_assert(std::is_trivially_copyable_v<RankStatus>);

// Copies `words`. Longer ones are cut between UTF-8 characters and end in
// "...".
StatusText status_text(std::string_view words);
std::string_view words_of(const StatusText& text);

// Describes what the rank does, to follow "rank 3": "ended iteration 7",
// "failed in iteration 7 at launch 2: division by zero".
std::string describe_status(const RankStatus& rank_status);

// Returns OK if no rank has failed, and kind, iteration, unit, fingerprint and
// `others` are equal on all ranks. The text is the same on every rank: Aborted
// names the ranks that have failed, where, and their words; FailedPrecondition
// the first of these fields that differs, and each rank's value.
absl::Status check_statuses(std::span<const RankStatus> by_rank);

// Returns true if the ranks can't go on with their groups after an exchange
// that did not agree: one of them says so, zeros would meet other collectives,
// or a rank has launched an iteration of which another one has another plan.
bool must_close_groups(std::span<const RankStatus> by_rank);

}  // namespace brigade

#endif  // BRIGADE_COMM_STATUS_RANK_STATUS_H_
