// Status exchange of a reducer with its peers, and the state of its process
// group: open, or closed with a reason.
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
#include "brigade/comm/status/status_channel.h"

namespace brigade {

// Result of one exchange, equal on all ranks.
struct StatusComparison {
  // OK: ranks agree, none has failed. Aborted: a rank has failed.
  // FailedPrecondition: ranks differ.
  absl::Status status = {};
  bool must_close = false;  // the group is unusable
  std::vector<RankStatus> by_rank = {};
};

// Throws unless ranks agree: PeerError if one has failed, RuntimeError if they
// differ. The text begins with `where`.
void throw_unless_agreed(const StatusComparison& comparison,
                         const std::string& where = "Reducer");

class PeerStatus {
 public:
  explicit PeerStatus(c10::intrusive_ptr<c10d::ProcessGroup> group);

  // Collective, once, before the first exchange and outside of backwards.
  // Throws PeerError.
  void connect();
  bool is_connected() const { return channel_ != nullptr; }
  // Returns false before connect() and in a forked child.
  bool is_usable_here() const { return channel_ && channel_->is_usable_here(); }

  // Prefix of keys in the group's store, equal on all ranks; empty: no peers.
  // REQUIRES: is_connected().
  const std::string& store_prefix() const { return channel_->store_prefix(); }

  // ---- "Others": the program's collectives between the reducer's. Zeros
  // for a failed iteration would meet them.

  // Resets the counts.
  void backward_begins();

  // Calls `launch`, and counts the reducer's collectives that it launches. If
  // it launches one and then throws, can_continue() becomes false.
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

  // If `value`, ranks also compare the number of collectives of each launch and
  // of the program's between the launches. For user's hooks, whose code may
  // differ, and whose continuations may launch some.
  void compare_others(bool value) { compares_others_ = value; }

  // Returns true while this rank can launch the rest of the sequence.
  bool can_continue() const { return !cannot_continue_; }
  void set_cannot_continue() { cannot_continue_ = true; }

  // ---- Statuses

  // Completes `own`, sends it, and returns it without waiting.
  // `ends_iteration`: with the hash of the program's collectives. Sends nothing
  // before connect(). Throws PeerError if the channel has failed before;
  // RuntimeError in a forked child.
  RankStatus send(RankStatus own, bool ends_iteration);

  // Blocks until all ranks have sent. REQUIRES: is_connected(). Throws
  // PeerError if a rank has left or died, or does not send within `timeout`; at
  // most the group's timeout.
  StatusComparison await(
      const RankStatus& sent,
      std::optional<std::chrono::milliseconds> timeout = std::nullopt);

  // Returns true if await() would not block.
  bool is_complete(const RankStatus& sent) const;

  // Closes the group's connections. require_open() throws the first reason.
  void close(std::string_view reason);

  // Sends `last` to the peers, and closes the group.
  void send_and_close(const RankStatus& last);

  // Records the reason, and keeps the connections: peers may still be in
  // collectives.
  void note_closed(std::string_view reason);
  bool is_closed() const { return !closed_because_.empty(); }

  // Throws PeerError with the reason if the group is closed.
  void require_open() const;

  // The fingerprint of the sequence that all ranks have compared.
  bool is_agreed(uint64_t fingerprint) const { return agreed_ == fingerprint; }
  void set_agreed(uint64_t fingerprint) { agreed_ = fingerprint; }

  // Asks which ranks still answer after a collective failed; nullopt without
  // peers. `key` is unique, and equal on all ranks. Blocks for a few seconds at
  // most.
  std::optional<LivenessProbe> find_survivors(const std::string& key);

 private:
  std::optional<int64_t> group_count();
  void note_others(std::optional<int64_t> count);
  void note_if_others(std::optional<int64_t> count);
  void add_to_hash(int64_t num_collectives);
  uint64_t hash_of_others();

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  bool group_counts_;  // false: no peers, or the group has no counter
  bool compares_others_ = false;
  bool cannot_continue_ = false;
  bool has_others_ = false;  // in the running or last backward
  // In the running iteration.
  int num_launches_ = 0;
  uint64_t hash_ = 0;  // of the collectives of and between the launches
  std::optional<int64_t> last_count_;  // the group's, after the last launch

  std::unique_ptr<StatusChannel> channel_;  // null until ranks connect
  std::string closed_because_;              // empty: the group is open
  std::optional<uint64_t> agreed_;
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_PEER_STATUS_H_
