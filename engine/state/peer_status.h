// What the engines of different ranks tell each other about their iterations,
// and what follows for this one.
//
// Decides when ranks are connected, and who has to launch what; the engine does
// it. docs/protocol.md, "Statuses".
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_ENGINE_STATE_PEER_STATUS_H_
#define BRIGADE_ENGINE_STATE_PEER_STATUS_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/comm/control/control_channel.h"
#include "brigade/comm/control/rank_status.h"
#include "brigade/comm/errors/liveness_probe.h"
#include "brigade/comm/group/channel_identity.h"
#include "brigade/engine/state/group_account.h"
#include "brigade/engine/state/status_comparison.h"

namespace brigade {

class PeerStatus {
 public:
  // `groups`: those that are launched on, kMaxGroups at most. The first one has
  // all ranks, which tell each other on it where they are; the others have some
  // of them each.
  // `has_channel`: false, ranks tell each other nothing. All exchanges agree
  // then, but for one that tells of a failure, which nobody hears: nothing can
  // bring ranks to the same place behind it.
  // `counts_launches`: false, each rank launches by itself all that its peers
  // may wait for, so that none has a deficit: of its launches a rank tells only
  // that it can't launch any more.
  PeerStatus(std::span<const c10::intrusive_ptr<c10d::ProcessGroup>> groups,
             bool has_channel, bool counts_launches = true);

  // Collective, once: ranks connect.  To be called before the first exchange,
  // and not in backward, where peers may wait for something else.
  void connect();

  // In place of connect(), where ranks don't construct this together: they
  // connect later, and meet whatever the others have constructed here.
  void connect_later();
  bool is_connected() const { return channel_ != nullptr || !has_channel_; }

  // Of keys in the group's store, equal on all ranks; empty: nobody to talk to.
  // REQUIRES: is_connected().
  std::string store_prefix() const {
    return channel_ ? channel_->store_prefix() : std::string();
  }

  // Of what is launched on a group, by its index.
  GroupAccount& on(size_t group) { return accounts_[group]; }

  // Whether a group has launched anything since the last exchange but an
  // opening: what others launch to get in step would meet that.
  bool has_gone_on();

  // The groups' connections are closed.
  void note_group_aborted() { is_group_aborted_ = true; }
  bool is_group_aborted() const { return is_group_aborted_; }

  // Ranks compare where the groups' other collectives lie between the launches:
  // for hooks that may launch some when others are complete.
  void compare_others(bool value);

  // All ranks stand in the same place, after they have launched their deficit.
  void restart_counts();

  // Tells the others where this rank is, filling in what was launched, and
  // returns at once. To be awaited in this order.
  //
  // `tells_launches`: false, what was launched is left for the next exchange to
  // tell.
  //
  // Errors: PeerError if the channel has failed before; RuntimeError in a
  // forked child. REQUIRES: is_connected().
  PendingExchange begin_exchange(RankStatus own, bool tells_launches = true);

  // The same once more, in another exchange.
  PendingExchange begin_again(const PendingExchange& before);

  // Waits until all have told.
  //
  // Errors: PeerError if a rank has left, died, or does not come within
  // `patience`, at most the group's timeout.
  // ENSURES: all ranks stand in the same place if all agree; otherwise
  // restart_counts() is to follow.
  StatusComparison await(
      const PendingExchange& pending,
      std::optional<std::chrono::milliseconds> patience = std::nullopt);

  // Whether await() would not wait.
  bool is_over(const PendingExchange& pending) const;

  // This rank can't launch on the group any more; says so and does not wait.
  // Does not throw.
  void tell_of_abort(RankStatus own) noexcept;

  // The plan that all ranks have been seen to have.
  bool is_agreed(uint64_t fingerprint) const { return agreed_ == fingerprint; }
  void set_agreed(uint64_t fingerprint) { agreed_ = fingerprint; }

  // Which ranks still answer after a collective failed; nullopt if there is
  // nobody to ask. `occasion` is unique, and equal on all ranks. Waits a few
  // seconds at most.
  std::optional<LivenessProbe> find_survivors(const std::string& occasion);

 private:
  StatusComparison without_channel(const RankStatus& own) const;

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;  // of all ranks
  const bool has_channel_;
  const bool counts_launches_;
  std::vector<GroupAccount> accounts_;       // by group
  std::optional<ChannelIdentity> identity_;  // if ranks connect later
  std::unique_ptr<ControlChannel> channel_;  // null until ranks connect
  bool is_group_aborted_ = false;
  PendingExchange last_words_;  // nobody waits for it, but it travels
  std::optional<uint64_t> agreed_;
};

}  // namespace brigade

#endif  // BRIGADE_ENGINE_STATE_PEER_STATUS_H_
