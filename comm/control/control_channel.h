// Exchanges statuses between the ranks of a group, beside the collectives
// that they speak of.
//
// Decides how long statuses are waited for, and what a rank is told whose
// peer has left or died; how they travel is comm/control/status_protocol.h's.
// What they mean is decided by those who send them (docs/protocol.md,
// "Statuses").
//
//   ControlChannel channel(group);
//   PendingExchange end =
//       channel.exchange({.kind = StatusKind::kEnd, .iteration = 7});
//   ...  // the collectives go on
//   absl::Status equal = check_statuses(channel.await(end));
//
// All channels of a group share its connections, and all of a process one
// thread, which passes on what others need whatever the caller does.  Nothing
// clashes there whatever ranks do: the n-th exchange of one rank on a channel
// meets the n-th of every other.  Nothing is copied to or from a GPU, and no
// stream is touched.
//
// A world of 1 answers itself.  So does a group without peers
// (comm/group/has_peers.h), with its own status for every rank.
//
// Thread safety: any thread may call.  The order of exchanges is that of the
// calls, so they must come in the same order on every rank.

#ifndef BRIGADE_COMM_CONTROL_CONTROL_CHANNEL_H_
#define BRIGADE_COMM_CONTROL_CONTROL_CHANNEL_H_

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/comm/control/rank_status.h"
#include "brigade/comm/control/status_mesh.h"
#include "brigade/comm/errors/liveness_probe.h"
#include "brigade/comm/group/channel_identity.h"

namespace brigade {

class AnswersStatuses;

// One exchange.  Keep it until it has been awaited; it may outlive the channel.
struct PendingExchange {
  RankStatus own = {};
  std::shared_ptr<StatusExchange> exchange = {};
};

class ControlChannel {
 public:
  // Collective: the first one of a group connects the ranks.  `identity`: that
  // of the peers' channels which this one meets; none: ranks make this channel
  // together.  Its timeout is the group's.  Errors: PeerError if ranks don't
  // meet in time.
  explicit ControlChannel(
      c10::intrusive_ptr<c10d::ProcessGroup> group,
      std::optional<ChannelIdentity> identity = std::nullopt);

  // Never waits for a peer.  Exchanges in flight end with an error, here and on
  // the ranks that wait for this one; those are told that this rank has left.
  // In a forked child, leaves everything to the parent.
  ~ControlChannel();

  ControlChannel(const ControlChannel&) = delete;
  ControlChannel& operator=(const ControlChannel&) = delete;

  // Sends `own`, with `sequence` filled in, and returns at once.
  //
  // Errors: PeerError, the one of before, when an exchange has failed;
  // RuntimeError in a forked child.
  PendingExchange exchange(RankStatus own);

  // Waits for all ranks, and returns their statuses by rank if they differ:
  // if check_statuses() of them is not OK.  `patience`: less than the group's
  // timeout.
  //
  // Errors: PeerError if a rank has left, died or not come in time: which
  // ranks, what this one waited for.  The channel is of no use then, and nor
  // are the group's others, unless the rank has left this one only.  The first
  // failure takes up to 3 s to find out who is still there, and a moment if the
  // missing ones' connections are closed.
  std::optional<std::vector<RankStatus>> await_difference(
      const PendingExchange& pending,
      std::optional<std::chrono::milliseconds> patience = std::nullopt);

  // Whether awaiting it would not wait: ranks have come, or can't.
  static bool is_over(const PendingExchange& pending);

  // What all ranks have told alike, though they need not.  REQUIRES: it has
  // been awaited, and ranks did not differ.
  static ToldAlike told_alike(const PendingExchange& pending);

  // The same as await_difference(), by rank in any case.  If they don't differ,
  // the own one stands for each: what is not compared is this rank's.
  std::vector<RankStatus> await(
      const PendingExchange& pending,
      std::optional<std::chrono::milliseconds> patience = std::nullopt);

  // Which ranks still answer after the group has failed.  `occasion`: unique,
  // and equal on all ranks.  Nullopt if there is nobody to ask.  Waits a few
  // seconds at most.
  std::optional<LivenessProbe> find_survivors(const std::string& occasion);

  // Of keys in the group's store that are the channel's; equal on all ranks.
  // Empty: nobody to talk to.
  const std::string& store_prefix() const { return prefix_; }

 private:
  void connect(std::optional<ChannelIdentity> identity);
  void check_process() const;
  [[noreturn]] void fail(const PendingExchange& pending,
                         StatusExchange::Outcome outcome,
                         const std::exception_ptr& cause);
  [[noreturn]] void fail_with(const std::string& context,
                              const std::exception_ptr& cause,
                              const LivenessProbe* probe);
  std::string describe_wait(const PendingExchange& pending) const;
  void leave();

  // Constant after construction.
  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const pid_t process_;
  const std::chrono::milliseconds timeout_;
  std::shared_ptr<StatusMesh> mesh_;    // null: nobody to talk to
  uint64_t number_ = 0;                 // the identity's
  std::string prefix_;                  // of store keys; equal on all ranks
  AnswersStatuses* answers_ = nullptr;  // owned by group_

  mutable std::mutex mutex_;
  // Guarded by mutex_.
  RankStatus last_;  // that was sent
  std::map<int64_t, std::shared_ptr<StatusExchange>> in_flight_;
  std::exception_ptr failure_;
};

}  // namespace brigade

#endif  // BRIGADE_COMM_CONTROL_CONTROL_CHANNEL_H_
