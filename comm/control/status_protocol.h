// What a rank sends, to whom and when, so that the statuses of an exchange
// come to all ranks in few messages, and so does word of a rank that has left.
//
// Decides rounds, the gather after a difference, and which exchanges can't be
// completed any more.  Knows no socket, no thread and no time;
// docs/protocol.md, "How statuses travel".  Internal to comm/.
//
// Thread safety: none.

#ifndef BRIGADE_COMM_CONTROL_STATUS_PROTOCOL_H_
#define BRIGADE_COMM_CONTROL_STATUS_PROTOCOL_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "brigade/comm/control/peer_links.h"
#include "brigade/comm/control/rank_status.h"
#include "brigade/comm/control/status_digest.h"
#include "brigade/comm/control/status_exchange.h"

namespace brigade {

// Of ranks that say hello; other channels have greater numbers.
inline constexpr uint64_t kHelloChannel = 0;

class StatusProtocol {
 public:
  using Send = std::function<void(int peer, Bytes message)>;

  // `send` reaches this rank's neighbours (comm/control/exchange_rounds.h),
  // does not wait, and does not call back.  REQUIRES: size > 1.
  StatusProtocol(int rank, int size, Send send);
  ~StatusProtocol();

  // Takes part with `own` in the exchange at (channel, own.sequence).
  // REQUIRES: sequences of a channel go up, from 1.
  std::shared_ptr<StatusExchange> begin(uint64_t channel,
                                        const RankStatus& own);

  void on_message(int from, Bytes message);
  void on_closed(int peer);

  // This rank takes part in no exchange behind `last` on the channel.
  void leave(uint64_t channel, const RankStatus& last);

  // Whose connections are closed, by anybody's word.
  std::vector<int> closed_ranks() const;

  // Nor in any that is not over, on any channel.  `last`: why.
  void abort_exchanges(const RankStatus& last);

 private:
  enum class MessageKind : uint32_t { kDigest, kStatuses, kDeparture };
  struct MessageHead;
  struct Exchange;
  struct Departure;

  struct Place {
    uint64_t channel = 0;
    int64_t sequence = 0;

    friend auto operator<=>(const Place&, const Place&) = default;
  };

  // What is known of a rank that does not do its part any more.
  struct Departed {
    struct Leaving {
      int64_t last_sequence = 0;
      int64_t iteration = 0;
    };
    std::map<uint64_t, Leaving> left = {};  // by channel
    // If it is gone from all: the last sequences by channel, 0 elsewhere.
    std::optional<std::map<uint64_t, int64_t>> ends = {};
    AbsenceReason reason = AbsenceReason::kClosed;  // of that
    std::optional<StatusOf> failure = {};
  };

  std::shared_ptr<StatusExchange> new_outcome();
  Exchange& exchange_at(const Place& place);
  bool is_open(const Place& place) const;

  void advance(const Place& place);
  bool combine_digests(const Place& place, Exchange& exchange);
  bool gather(const Place& place, Exchange& exchange);
  void take_statuses(Exchange& exchange, int round);
  void send_digest(const Place& place, const Exchange& exchange, int round);
  void send_statuses(const Place& place, const Exchange& exchange, int round);

  bool is_source(int peer) const;
  bool has_done_all(int peer) const;
  Departure departure_of_closed(int peer) const;
  std::optional<StatusOf> failure_heard_from(int peer) const;
  void require_from(int source, const Place& place);
  void on_departure(int from, Bytes payload);
  void tell(const Departure& departure);
  void spread(const Departure& departure, int except);
  bool merge(const Departure& departure);
  std::vector<Absence> absences_at(const Place& place) const;
  void break_exchanges();

  // Constant after construction.
  const int rank_;
  const int size_;
  const int rounds_;
  const std::vector<int> neighbours_;
  const Send send_;

  std::map<Place, Exchange> exchanges_;   // that are not over
  std::map<uint64_t, int64_t> channels_;  // last sequences begun here
  // Last sequences of digests, by sender and channel.
  std::map<std::pair<int, uint64_t>, int64_t> heard_;
  std::set<int> closed_;  // neighbours
  std::map<int, Departed> departed_;
  std::vector<std::shared_ptr<StatusExchange>> outcomes_;  // to use again
};

}  // namespace brigade

#endif  // BRIGADE_COMM_CONTROL_STATUS_PROTOCOL_H_
