// Messages among the ranks of a group that are on one host, through memory that
// they share: what a rank posts all its peers there may read in place, so that
// it is copied once, where a socket copies it twice for each peer.
//
//   if (messages.post({lane, number}, tag, pieces)) ...   // peers can read it
//   ...
//   const HostOutbox::Post post = messages.await(peer, {lane, number},
//   deadline); add(post.data); messages.release(peer, {lane, number});
//
// Posts are told apart by their key, which ranks agree about, and read by every
// peer once, even where there was no room for their data: that is then to be
// sent otherwise.
//
// Thread safety: as HostOutbox.

#ifndef BRIGADE_COMM_ORDERED_HOST_MESSAGES_H_
#define BRIGADE_COMM_ORDERED_HOST_MESSAGES_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "brigade/comm/group/rank_names.h"
#include "brigade/comm/ordered/host_outbox.h"
#include "brigade/comm/ordered/host_relays.h"

namespace brigade {

class HostMessages {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  // Collective.  `bytes`: room for what this rank has posted and peers have not
  // read.  Where memory can't be shared, there are no peers.  `host`: ranks
  // with others are of other hosts.  `names`: of ranks, in errors.  Errors: the
  // backend's.
  HostMessages(c10d::Backend& backend, size_t bytes, int64_t host = 0,
               RankNames names = {});

  // Peers may still read what was posted.
  ~HostMessages() { set_state(HostOutbox::State::kLeft); }
  HostMessages(const HostMessages&) = delete;
  HostMessages& operator=(const HostMessages&) = delete;

  int name_of(int peer) const { return names_[peer]; }
  bool reaches(int peer) const { return peers_[peer] != nullptr; }
  bool has_peers() const { return num_peers_ > 0; }
  // Whether every rank reaches every other: the same on all.
  bool joins_all() const { return joins_all_; }
  // Of ranks that reach each other, as all know it.
  const HostRelays& relays() const { return *relays_; }

  // Returns whether there was room.  Waits while 1,000 earlier posts of the
  // lane are unread.  REQUIRES: has_peers().  Errors: RuntimeError after
  // abort(), or behind the deadline.
  bool post(HostOutbox::Key key, uint64_t tag,
            std::span<const std::span<const std::byte>> pieces,
            Deadline deadline);

  // Returns when `peer` has posted it.  REQUIRES: reaches(peer).  Errors: as
  // post(), and if the peer has failed, or has left without it.
  HostOutbox::Post await(int peer, HostOutbox::Key key, Deadline deadline);
  void release(int peer, HostOutbox::Key key) { peers_[peer]->release(key); }

  // Ends all waits of this rank, and of its peers for it, also later ones.
  void abort();

 private:
  void set_state(HostOutbox::State state);
  void raise_signals_of_peers();
  template <typename Condition>
  void wait_until(const Condition& is_true, Deadline deadline);

  // Constant after construction.
  const RankNames names_;
  std::unique_ptr<HostOutbox> own_;
  std::vector<std::unique_ptr<HostOutbox>> peers_;  // by rank; null: not here
  int num_peers_ = 0;
  bool joins_all_ = false;
  std::optional<HostRelays> relays_;

  std::atomic<bool> is_aborted_ = false;
};

}  // namespace brigade

#endif  // BRIGADE_COMM_ORDERED_HOST_MESSAGES_H_
