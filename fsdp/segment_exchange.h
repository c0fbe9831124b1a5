// Messages between ranks about a segment: its opening, and its rounds.
//
// All of them are statuses (comm/status/status_channel.h), in shared memory on
// one host. Bitmaps lie in the statuses' texts, so a round is one exchange for
// each 1,536 bits.
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
  uint64_t schedule = 0;  // fingerprint of the tag's known schedule; 0: none
  uint64_t settings = 0;  // must be equal on all ranks
  uint64_t slices = 0;    // hash of the units that are kept in slices; 0: none
};

struct RoundAnswers {
  std::vector<RoundMessage> by_rank = {};
  std::string error = {};        // names the ranks that have failed
  bool has_unconfirmed = false;  // ranks have gone on without these answers
};

// Throws the current exception; a peer's or the network's as PeerError
// "fully_shard: <doing>: ...".
[[noreturn]] void throw_named(const std::string& doing);
[[noreturn]] void throw_of_peers(const std::string& text);  // PeerError

class SegmentExchange {
 public:
  // Collective.
  SegmentExchange(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                  size_t num_units, size_t num_parameters,
                  std::shared_ptr<Progress> progress);

  // Returns the kind and tag that ranks with data open, and `schedule` and
  // `slices` if these are equal on all ranks, otherwise 0. Throws PeerError,
  // also with the same text on all ranks if they open segments of different
  // kinds or settings: none is open then. `awaits`: false: the peers are taken
  // to say the same until confirm().
  OpeningMessage open(const OpeningMessage& own, bool awaits);

  // Throws PeerError if ranks have gone on that this round asks to stay.
  // `patience`: nullopt: the group's timeout.
  RoundAnswers round(
      const RoundMessage& own,
      std::optional<std::chrono::milliseconds> patience = std::nullopt);
  // The last round of a segment that goes as recorded, as far as this rank
  // knows: not awaited until confirm(). REQUIRES: may_end_unconfirmed().
  void end_unconfirmed(const RoundMessage& own);
  // Few enough units and parameters.
  bool may_end_unconfirmed() const;

  // Awaits what was not awaited, but for the last `num_segments` segments.
  // Throws PeerError if it was other than expected.
  void confirm(size_t num_segments = 0);

  // Collective: ranks go on if all say the same. `text`: "unshards unit 'a'".
  // Returns `number` of each rank. Throws PeerError.
  std::vector<int64_t> ask(const std::string& text, uint64_t digest,
                           int64_t number = 0);

  // In place of open() or ask() on a rank that can't: these throw PeerError
  // with `error` on the peers.
  void fail(const std::string& error);

  StatusChannel& channel() { return channel_; }
  // A peer is lost, or has failed in a segment after which this rank has gone
  // on.
  bool is_broken() const { return is_broken_; }

 private:
  using Sent = std::vector<RankStatus>;

  void confirm_oldest();
  size_t num_chunks() const;
  std::vector<RankStatus> meet(RankStatus own);
  Sent send(const RoundMessage& own, uint64_t state);
  std::vector<RankStatus> await(
      const RankStatus& own,
      std::optional<std::chrono::milliseconds> patience = std::nullopt);
  RoundAnswers await_round(
      const Sent& sent,
      std::optional<std::chrono::milliseconds> patience = std::nullopt);

  StatusChannel channel_;
  const size_t num_units_;
  const size_t num_parameters_;
  const std::shared_ptr<Progress> progress_;
  int64_t num_opened_ = 0;
  bool is_broken_ = false;
  SegmentKind kind_ = SegmentKind::kForward;  // of the open one
  std::deque<Sent> unconfirmed_;              // openings and rounds
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_SEGMENT_EXCHANGE_H_
