// Exchanges statuses between the ranks of a group, separately from the group's
// collectives: on one host in shared memory, otherwise by all-gathers on a
// subgroup. The n-th exchange of one rank on a channel meets the n-th of every
// other.
//
//   StatusChannel channel(group);
//   RankStatus end = channel.exchange({.kind = StatusKind::kEnd});
//   ...  // the collectives go on
//   absl::Status all_agree = check_statuses(channel.await(end));
//
// A group without peers (has_peers()) answers itself, with its own status for
// every rank.
//
// Thread safety: one call at a time.

#ifndef BRIGADE_COMM_STATUS_STATUS_CHANNEL_H_
#define BRIGADE_COMM_STATUS_STATUS_CHANNEL_H_

#include <sys/types.h>

#include <chrono>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/comm/errors/liveness_probe.h"
#include "brigade/comm/status/rank_status.h"
#include "brigade/comm/status/status_transport.h"

namespace brigade {

class StatusChannel {
 public:
  // Collective. The timeout is the group's. Throws PeerError if ranks do not
  // meet in time.
  explicit StatusChannel(c10::intrusive_ptr<c10d::ProcessGroup> group);

  // Never waits for a peer. Ranks that wait for a later status of this one get
  // an error that says that it has left. In a forked child, does nothing.
  ~StatusChannel();

  StatusChannel(const StatusChannel&) = delete;
  StatusChannel& operator=(const StatusChannel&) = delete;

  // Sends `own` and returns it with `sequence` set, at once. Throws PeerError,
  // the earlier one, after an exchange has failed; RuntimeError in a forked
  // child. REQUIRES: at most kMaxStatusesInFlight are not awaited.
  RankStatus exchange(RankStatus own);

  // Blocks until all ranks have sent, and returns their statuses by rank.
  // `patience`: less than the group's timeout. Call it once for each exchange.
  //
  // Throws PeerError that names the rank that has left, died or not come in
  // time, after up to 3 s more if it must ask who is there. The channel is of
  // no use then.
  std::vector<RankStatus> await(
      const RankStatus& own,
      std::optional<std::chrono::milliseconds> patience = std::nullopt);

  // Returns true if await() would not block.
  bool is_complete(const RankStatus& own);

  // Ends the channel after a failure elsewhere. Ranks that wait for a status of
  // this one get an error that names ranks that are lost.
  void give_up(const std::exception_ptr& cause);

  // Asks through the group's store which ranks still answer after the group has
  // failed. `occasion`: unique, and equal on all ranks. Nullopt if there is
  // nobody to ask. Blocks for 3 s at most.
  std::optional<LivenessProbe> find_survivors(const std::string& occasion);

  // Prefix of the channel's keys in the group's store; equal on all ranks.
  // Empty: there is nobody to talk to.
  const std::string& store_prefix() const { return prefix_; }

 private:
  void connect();
  void check_process() const;
  std::string describe_wait(const RankStatus& own) const;
  [[noreturn]] void fail(const RankStatus& own,
                         const std::exception_ptr& cause);
  [[noreturn]] void fail_with(const std::string& context,
                              const std::exception_ptr& cause,
                              const LivenessProbe* probe);

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const pid_t process_;
  const std::chrono::milliseconds timeout_;
  std::shared_ptr<StatusTransport> transport_;  // null: answers itself
  std::string prefix_;
  RankStatus last_;  // that was sent
  std::exception_ptr failure_;
};

}  // namespace brigade

#endif  // BRIGADE_COMM_STATUS_STATUS_CHANNEL_H_
