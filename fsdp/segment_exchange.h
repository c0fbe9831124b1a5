// Messages between ranks about a segment (fsdp/schedule.h): its opening and its
// rounds. Each message is one or more statuses (comm/status/status_channel.h);
// a status's text carries 1,536 bits of a round's bitmaps.
//
// Thread safety: one call at a time.

#ifndef BRIGADE_FSDP_SEGMENT_EXCHANGE_H_
#define BRIGADE_FSDP_SEGMENT_EXCHANGE_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/comm/errors/error_texts.h"
#include "brigade/comm/status/status_channel.h"
#include "brigade/fsdp/schedule.h"
#include "brigade/observing/stall_watch.h"

namespace brigade {

struct OpeningMessage {
  SegmentKind kind = SegmentKind::kForward;
  uint64_t tag = 0;       // segments with equal tags share a schedule
  uint64_t schedule = 0;  // fingerprint of the tag's schedule; 0: none
  uint64_t settings = 0;  // hash that must be equal on ranks with data
  uint64_t slices = 0;    // hash of the units that hold slices; 0: none
  // Distinct tags of all ranks with data, if the answers were awaited.
  std::set<uint64_t> tags = {};
};

struct RoundAnswers {
  std::vector<RoundMessage> by_rank = {};
  std::string error = {};            // names the failed ranks, if any
  bool has_unconfirmed_end = false;  // a rank called end_unconfirmed()
};

// Rethrows the current exception; failures of a peer or the network as
// PeerError "fully_shard: <context>: ...".
[[noreturn]] void throw_with_context(const std::string& context);
[[noreturn]] void throw_peer_failure(const std::string& text);  // PeerError

class SegmentExchange {
 public:
  // Collective.
  SegmentExchange(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                  size_t num_units, size_t num_parameters,
                  std::shared_ptr<Progress> progress);

  // Opens a segment. Returns the kind and tag of the ranks with data, and
  // `schedule`, `settings` and `slices` if equal on all of them, otherwise 0.
  // Throws the same PeerError on all ranks, and opens none, if kinds differ;
  // RuntimeError if no rank has data. Without `awaits` returns `own` at once if
  // it has a schedule; confirm() checks it.
  OpeningMessage open(const OpeningMessage& own, bool awaits);

  // Exchanges messages. Throws PeerError if a rank called end_unconfirmed() but
  // the segment must continue. A failed rank waits at most 30 s.
  RoundAnswers round(const RoundMessage& own);
  // Sends the last round of a segment that ran as recorded on this rank;
  // confirm() awaits the answers. REQUIRES: may_end_unconfirmed().
  void end_unconfirmed(const RoundMessage& own);
  // A round's bitmaps fit into the statuses in flight.
  bool may_end_unconfirmed() const;

  // Awaits outstanding messages, except of the last `num_segments` segments.
  // Throws PeerError if a rank failed or did not run as recorded.
  void confirm(size_t num_segments = 0);

  // Collective. Returns `number` of each rank. Throws PeerError if `text`
  // ("unshards unit 'a'") or `hash` differ between ranks.
  std::vector<int64_t> compare(const std::string& text, uint64_t hash,
                               int64_t number = 0);

  // Replaces open() or compare() after an error on this rank; the peers' calls
  // throw PeerError with `error`.
  void fail(const std::string& error);

  StatusChannel& channel() { return channel_; }
  // A peer is lost, or failed in a segment that this rank has ended.
  bool is_broken() const { return is_broken_; }

 private:
  using Sent = std::vector<RankStatus>;

  void note_end(bool has_ended);
  void confirm_oldest();
  size_t num_chunks() const;
  std::vector<RankStatus> exchange_and_await(RankStatus own);
  Sent send(const RoundMessage& own, uint64_t state);
  std::vector<RankStatus> await(
      const RankStatus& own,
      std::optional<std::chrono::milliseconds> timeout = std::nullopt);
  RoundAnswers await_round(
      const Sent& sent,
      std::optional<std::chrono::milliseconds> timeout = std::nullopt);

  StatusChannel channel_;
  const size_t num_units_;
  const size_t num_parameters_;
  const std::shared_ptr<Progress> progress_;
  int64_t num_steps_ = 0;  // reduced backwards that ended on all ranks
  bool is_broken_ = false;
  // Of the last segment.
  SegmentKind kind_ = SegmentKind::kForward;
  int64_t step_ = 0;
  int64_t iteration_ = iteration_of(kind_, step_);
  std::deque<Sent> unconfirmed_;  // openings and rounds
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_SEGMENT_EXCHANGE_H_
