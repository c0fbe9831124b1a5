// A reducer's side of the status exchange, and the state of its group: open, or
// closed for a reason.
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_REDUCER_PEER_STATUS_H_
#define BRIGADE_REDUCER_PEER_STATUS_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "absl/status/status.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/status/rank_status.h"
#include "brigade/comm/status/status_channel.h"

namespace brigade {

// Summary of the statuses of all ranks, equal on every rank.
struct StatusComparison {
  // OK: all ranks agree, none has failed. Aborted: ranks have failed.
  // FailedPrecondition: ranks differ.
  absl::Status status = {};
  bool must_close = false;  // the group can't be used any more
  std::vector<RankStatus> by_rank = {};
};

// Throws on all ranks, unless they agree: PeerError if ranks have failed,
// RuntimeError if they differ. `where` begins the text.
void throw_if_apart(const StatusComparison& comparison,
                    const std::string& where = "Reducer");

class PeerStatus {
 public:
  explicit PeerStatus(c10::intrusive_ptr<c10d::ProcessGroup> group);

  // Collective, once, before the first exchange. Not in backward, where peers
  // may wait for something else. Throws PeerError.
  void connect();
  bool is_connected() const { return channel_ != nullptr; }

  // Prefix of keys in the group's store, equal on all ranks; empty: there is
  // nobody to talk to. REQUIRES: is_connected().
  const std::string& store_prefix() const { return channel_->store_prefix(); }

  // ---- Other collectives that the group launches between the reducer's in a
  // backward: zeros for a failed iteration would meet them.

  // A backward of an iteration begins: other collectives count from here.
  void backward_begins();

  // Calls `launch`, which launches the reducer's own collectives. If it throws
  // after it has launched something, nothing can be launched in its place.
  template <typename Launch>
  void count(const Launch& launch) {
    const std::optional<int64_t> before = group_count();
    note_others(before);
    try {
      launch();
    } catch (...) {
      if (before && group_count() != before) cannot_continue_ = true;
      throw;
    }
    if (!before) return;
    ++num_launches_;
    last_count_ = group_count().value_or(*before);
    add_to_hash(*last_count_ - *before);
  }

  // Ranks compare where other collectives lie between the launches: for hooks
  // that may launch some when others are complete.
  void compare_others(bool value) { compares_others_ = value; }

  // True while this rank can launch on the group.
  bool can_continue() const { return !cannot_continue_; }
  void set_cannot_continue() { cannot_continue_ = true; }

  // ---- Statuses

  // Sends `own`, completed, and returns it at once. `ends_iteration`: with the
  // hash of other collectives. Throws PeerError if the channel has failed
  // before; RuntimeError in a forked child. Sends nothing before connect().
  RankStatus send(RankStatus own, bool ends_iteration);

  // Blocks until all have sent. REQUIRES: is_connected(). Throws PeerError if a
  // rank has left, died, or does not come within `patience`, at most the
  // group's timeout.
  StatusComparison await(
      const RankStatus& sent,
      std::optional<std::chrono::milliseconds> patience = std::nullopt);

  // Returns true if await() would not block.
  bool is_complete(const RankStatus& sent) const;

  // Closes the group's connections. Later calls throw the first reason.
  void close(std::string_view reason);

  // Sends `last` to the peers, then closes.
  void leave(const RankStatus& last);

  // As close(), but for the connections: peers may still be in collectives.
  void note_closed(std::string_view reason);
  bool is_closed() const { return !closed_because_.empty(); }

  // Throws PeerError with the reason if the group is closed.
  void require_open() const;

  // The plan that all ranks have been seen to have.
  bool is_agreed(uint64_t fingerprint) const { return agreed_ == fingerprint; }
  void set_agreed(uint64_t fingerprint) { agreed_ = fingerprint; }

  // Asks which ranks still answer after a collective failed; nullopt if there
  // is nobody to ask. `occasion` is unique, and equal on all ranks. Blocks for
  // a few seconds at most.
  std::optional<LivenessProbe> find_survivors(const std::string& occasion);

 private:
  std::optional<int64_t> group_count();
  void note_others(std::optional<int64_t> count);
  void note_if_others(std::optional<int64_t> count);
  void add_to_hash(int64_t num_collectives);
  uint64_t hash_of_others();

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  bool group_counts_;  // false without peers, or if the group can't tell
  bool compares_others_ = false;
  bool cannot_continue_ = false;
  bool has_others_ = false;  // in the running or last backward
  // Of the running iteration.
  int num_launches_ = 0;
  uint64_t hash_ = 0;
  std::optional<int64_t> last_count_;  // the group's, after the last launch

  std::unique_ptr<StatusChannel> channel_;  // null until ranks connect
  std::string closed_because_;              // empty: the group is open
  std::optional<uint64_t> agreed_;
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_PEER_STATUS_H_
