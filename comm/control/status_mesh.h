// What the ranks of a group exchange statuses over, beside the connections of
// its collectives: links to a few of the other ranks, which pass on to the
// rest.
//
// Decides when ranks connect: one mesh serves all channels that a process has
// on a group, and is made by the first of them.  What is sent is decided by
// comm/control/status_protocol.h, here is its lock.  Internal to comm/.
//
// Thread safety: any thread.  What comes is handled on the links' thread, so an
// exchange goes on whatever the threads of this rank do.

#ifndef BRIGADE_COMM_CONTROL_STATUS_MESH_H_
#define BRIGADE_COMM_CONTROL_STATUS_MESH_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/comm/control/peer_links.h"
#include "brigade/comm/control/rank_status.h"
#include "brigade/comm/control/status_exchange.h"
#include "brigade/comm/control/status_protocol.h"

namespace brigade {

class StatusMesh final : private LinkListener {
 public:
  // That of a group, for as long as the group lives.  Collective the first
  // time: ranks connect, within the group's timeout.  The group's store is not
  // held meanwhile.  Errors: RuntimeError, and what the store throws. REQUIRES:
  // more than one rank, and a store.
  static std::shared_ptr<StatusMesh> of(
      const c10::intrusive_ptr<c10d::ProcessGroup>& group);

  // `prefix`: of keys in the group's store; equal on all ranks, and this mesh's
  // own.  `links`: to this rank's neighbours (comm/control/exchange_rounds.h).
  StatusMesh(std::string prefix, int rank, int size,
             std::unique_ptr<PeerLinks> links);

  // Waits until all ranks have come here.  Errors: RuntimeError.
  void say_hello(std::chrono::milliseconds timeout);

  // Sends `own`, and returns at once. The exchange meets the peers' at the same
  // channel and sequence.
  std::shared_ptr<StatusExchange> begin(uint64_t channel,
                                        const RankStatus& own);

  // Tells all ranks that this one takes part in nothing behind `last` on the
  // channel.  What it has begun goes on.
  void leave(uint64_t channel, const RankStatus& last);

  // Ends all exchanges that are not over, on every channel and rank, and all to
  // come.  `last`: what this rank was waiting with.
  void abort_exchanges(const RankStatus& last);

  // Those whose connections are closed, by anybody's word.
  std::vector<int> closed_ranks();

  const std::string& prefix() const { return prefix_; }

  struct Traffic {
    int connections = 0;
    int64_t messages_sent = 0;  // so far
    int64_t messages_received = 0;
  };
  Traffic traffic() const;

 private:
  void on_message(int from, Bytes message) override;
  void on_closed(int peer) override;

  const std::string prefix_;
  std::atomic<int64_t> messages_sent_ = 0;
  std::atomic<int64_t> messages_received_ = 0;
  std::mutex mutex_;
  StatusProtocol protocol_;  // guarded by mutex_
  // Ends first: it calls this object.
  const std::unique_ptr<PeerLinks> links_;
};

}  // namespace brigade

#endif  // BRIGADE_COMM_CONTROL_STATUS_MESH_H_
