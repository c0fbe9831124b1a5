// What ranks tell each other about a segment: its opening, and its rounds.
//
// Everything travels as statuses (comm/status/status_channel.h), in shared
// memory on one host. Bitmaps lie in the statuses' texts, so a round is one
// exchange for each 1,536 bits.
//
// Thread safety: one call at a time.

#ifndef BRIGADE_FSDP_SEGMENT_EXCHANGE_H_
#define BRIGADE_FSDP_SEGMENT_EXCHANGE_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/comm/status/status_channel.h"
#include "brigade/fsdp/schedule.h"
#include "brigade/observing/stall_watch.h"

namespace brigade {

enum class SegmentKind : int8_t {
  kForward,
  kLocalBackward,  // gradients stay on the rank
  kBackward,       // gradients are reduced
  kShadow,         // whatever the peers open: of a rank without data
};

struct OpeningMessage {
  SegmentKind kind = SegmentKind::kForward;
  uint64_t tag = 0;       // segments of one tag are expected to be alike
  uint64_t schedule = 0;  // fingerprint of what is known of the tag; 0: none
  uint64_t settings = 0;  // must be equal on all ranks
  uint64_t slices = 0;    // units that are kept in slices
};

// The same on all ranks.
struct Opened {
  SegmentKind kind = SegmentKind::kForward;
  uint64_t tag = 0;
  bool has_schedule = false;  // all ranks know one schedule of the tag
  bool has_slices = false;    // all ranks keep the same slices
};

struct SegmentRound {
  RoundMessage message;
  // By parameter of the model: has a gradient on this rank. Empty: forward.
  std::vector<char> used = {};
  std::string error = {};  // empty: has not failed
};

struct RoundAnswers {
  std::vector<RoundMessage> by_rank = {};
  std::vector<char> used = {};   // on any rank
  std::string error = {};        // names the ranks that have failed
  bool has_unconfirmed = false;  // ranks have gone on without these answers
};

// Throws the current exception; a peer's or the network's as PeerError
// "fully_shard: <doing>: ...".
[[noreturn]] void throw_named(const std::string& doing);

class SegmentExchange {
 public:
  // Collective. `num_bits`: of a round of a backward.
  SegmentExchange(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                  size_t num_units, size_t num_parameters,
                  std::shared_ptr<Progress> progress);

  // Throws PeerError, also with the same text on all ranks if they open
  // segments of different kinds or settings: none is open then. `awaits`:
  // false: the peers are taken to say the same until confirm().
  Opened open(const OpeningMessage& own, bool awaits);

  // Throws PeerError if ranks have gone on that this round asks to stay.
  // `patience`: nullopt: the group's timeout.
  RoundAnswers round(
      const SegmentRound& own,
      std::optional<std::chrono::milliseconds> patience = std::nullopt);
  // The last round of a segment that goes as recorded, as far as this rank
  // knows: not awaited until confirm(). REQUIRES: may_end_unconfirmed().
  void end_unconfirmed(const SegmentRound& own);
  // Few enough units and parameters.
  bool may_end_unconfirmed() const;

  // Awaits what was not awaited, but for the last `num_segments` segments.
  // Throws PeerError if it was other than expected.
  void confirm(size_t num_segments = 0);

  // Collective: ranks go on if all say the same. `text`: "unshards unit 'a'".
  // Returns the sum of `number` over ranks. Throws PeerError.
  int64_t ask(const std::string& text, uint64_t digest, int64_t number = 0);

  // In place of open() or ask() on a rank that can't: these throw PeerError
  // with `error` on the peers.
  void fail(const std::string& error);

  StatusChannel& channel() { return channel_; }
  // A peer is lost, or has failed in a segment after which this rank has gone
  // on.
  bool is_broken() const { return is_broken_; }

 private:
  struct Unconfirmed {
    std::vector<RankStatus> sent;
    bool is_opening = false;
    bool is_backward = false;
  };

  void confirm_oldest();
  void confirm_opening(const RankStatus& own);
  size_t num_chunks() const;
  std::vector<RankStatus> pack(const SegmentRound& own,
                               bool is_unconfirmed) const;
  std::vector<RankStatus> await(
      const RankStatus& own,
      std::optional<std::chrono::milliseconds> patience = std::nullopt);
  RoundAnswers await_round(const std::vector<RankStatus>& sent,
                           bool is_backward,
                           std::optional<std::chrono::milliseconds> patience);

  StatusChannel channel_;
  const size_t num_units_;
  const size_t num_parameters_;
  const int own_rank_;
  const std::shared_ptr<Progress> progress_;
  int64_t num_opened_ = 0;
  bool is_broken_ = false;
  SegmentKind kind_ = SegmentKind::kForward;  // of the open one
  std::deque<Unconfirmed> unconfirmed_;       // in order
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_SEGMENT_EXCHANGE_H_
