// What a rank says about its place among the collectives of a group: what it is
// about to launch, or that it has ended an iteration, or that it has failed.
//
// Decides what a status holds and how it is put into words.  How statuses
// travel is comm/status_protocol.h's, what follows from them is
// comm/status_check.h's business; docs/protocol.md, "Statuses", has both.
//
//   RankStatus end = {.kind = StatusKind::kEnd,
//                        .iteration = 7,
//                        .launches = 3};
//
// Thread safety: values and pure functions.

#ifndef BRIGADE_COMM_RANK_STATUS_H_
#define BRIGADE_COMM_RANK_STATUS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <type_traits>

namespace brigade {

enum class StatusKind : int64_t {
  kIdle,     // has not begun the iteration, and asks where the others are
  kBegin,    // begins an iteration
  kLaunch,   // launches one collective
  kEnd,      // has launched all collectives of the iteration
  kArrived,  // has their results
  kFailed,   // has given the iteration up
};

// In place of a number of launches: the sender's connections are gone, or it
// can't tell what it has launched.
inline constexpr int64_t kLostGroup = -1;

inline constexpr int64_t kUnknownCount = std::numeric_limits<int64_t>::min();

// Zero-terminated unless full.
using StatusText = std::array<char, 176>;

// Travels as it lies in memory: ranks run the same build on like machines.
struct RankStatus {
  StatusKind kind = StatusKind::kIdle;
  int64_t sequence = 0;  // place among the exchanges; set by the channel
  int64_t iteration = 0;
  int64_t unit = -1;         // bucket, or unit of sharding; -1: none
  int64_t numel = 0;         // of what is launched
  uint64_t fingerprint = 0;  // of plan and options

  // What the sender has launched since the last exchange, or kLostGroup; and
  // how many collectives of the group that was.
  int64_t launches = 0;
  int64_t own_collectives = 0;

  // All collectives that the group has launched since then, by whomever, or
  // kUnknownCount. Set by the channel.
  int64_t group_launches = kUnknownCount;

  // A digest of where others' collectives of the group lie between the
  // sender's launches; 0: not compared.
  uint64_t others = 0;

  StatusText text = {};  // an error, or what the fingerprint stands for
};

static_assert(sizeof(RankStatus) == 256);
static_assert(std::is_trivially_copyable_v<RankStatus>);

// Longer ones are cut, between characters of UTF-8, and end in "...".
StatusText status_text(std::string_view words);
std::string_view words_of(const StatusText& text);

// What the rank does, to follow "rank 3": "ended iteration 7 after 3 launches",
// "failed in iteration 7 at bucket 2: division by zero".  `unit_name` is what
// the caller calls a unit.
std::string describe_status(const RankStatus& rank_status,
                            std::string_view unit_name = "bucket");

}  // namespace brigade

#endif  // BRIGADE_COMM_RANK_STATUS_H_
