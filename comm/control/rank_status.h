// What a rank says about its place among the collectives of its groups: that it
// begins an iteration, or has ended it, or has failed.
//
// Decides what a status holds and how it is put into words.  How statuses
// travel is comm/control/status_protocol.h's, what follows from them is
// comm/control/status_check.h's business; docs/protocol.md, "Statuses", has
// both.
//
//   RankStatus end = {.kind = StatusKind::kEnd, .iteration = 7};
//   end.by_group[0].launches = 3;
//
// Thread safety: values and pure functions.

#ifndef BRIGADE_COMM_CONTROL_RANK_STATUS_H_
#define BRIGADE_COMM_CONTROL_RANK_STATUS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <type_traits>

namespace brigade {

enum class StatusKind : int32_t {
  kIdle,     // has not begun the iteration, and asks where the others are
  kBegin,    // begins an iteration
  kAsk,      // is about to do what `text` says, if all ranks are
  kEnd,      // has launched all collectives of the iteration
  kChained,  // has launched the second ones behind them (then_collective())
  kArrived,  // has their results
  kFailed,   // has aborted the iteration
  // Has heard that an iteration has failed which others may have gone on from,
  // and begins nothing.
  kFollowUp,
};

// In place of a number of launches: the sender's connections are gone, or it
// can't tell what it has launched.
inline constexpr int32_t kAbortedGroup = -1;

inline constexpr int32_t kUnknownCount = std::numeric_limits<int32_t>::min();

// Of one process group, since the last exchange.
struct GroupCounts {
  int32_t launches = 0;  // the sender's, or kAbortedGroup

  // Collectives that the group has launched, by whomever, and that are part of
  // none of these.
  int32_t foreign = kUnknownCount;
};

// That a sender launches on.
inline constexpr size_t kMaxGroups = 8;

// Zero-terminated unless full.
using StatusText = std::array<char, 192>;

// What the sender has launched on the group of all ranks in front of a forward,
// of which a peer that does not come there can launch the same.
struct OpeningTold {
  uint16_t num_collectives = 0;  // 0: nothing
  uint16_t form = 0;             // a digest of them
};

// Travels as it lies in memory: ranks run the same build on like machines.
struct RankStatus {
  StatusKind kind = StatusKind::kIdle;
  OpeningTold opening = {};  // since the last exchange; not compared
  int64_t sequence = 0;      // place among the exchanges; set by the channel
  int64_t iteration = 0;
  // Where it has failed: a bucket, or a sharded unit's sum. Of kIdle: 0 behind
  // a forward. Of kAsk: a unit that it wants from its peers. -1: none.
  int64_t unit = -1;
  uint64_t fingerprint = 0;  // of plan and options

  // A digest of where others' collectives lie between the sender's launches; 0:
  // not compared.
  uint64_t others = 0;

  // What the sender would do from the next iteration on, in a digest; 0:
  // nothing else. Of other kinds than kEnd: a digest of what it would give to
  // whoever wants it. Ranks of which these differ agree nevertheless.
  uint64_t proposal = 0;

  // Of the order in which the sender has needed what it launches beside the
  // sequence, in a digest; 0: it needs nothing. Ranks of which these differ
  // agree nevertheless.
  uint64_t order = 0;

  std::array<GroupCounts, kMaxGroups> by_group = {};

  StatusText text = {};  // an error, or what the fingerprint stands for
};

static_assert(sizeof(RankStatus) == 320);
static_assert(std::is_trivially_copyable_v<RankStatus>);

// Longer ones are cut, between characters of UTF-8, and end in "...".
StatusText status_text(std::string_view words);
std::string_view words_of(const StatusText& text);

// On all groups.
int64_t num_launches(const RankStatus& rank_status);

// What the rank does, to follow "rank 3": "ended iteration 7 after 3 launches",
// "failed in iteration 7 at launch 2: division by zero".
std::string describe_status(const RankStatus& rank_status);

}  // namespace brigade

#endif  // BRIGADE_COMM_CONTROL_RANK_STATUS_H_
