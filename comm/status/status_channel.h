// Status of one rank in an iteration, a fixed-size record, and the channel on
// which a group's ranks exchange statuses and compare them: in shared memory on
// one host, otherwise by all-gathers on a subgroup. The n-th exchange of a rank
// on a channel is matched with the n-th of every other rank.
//
//   StatusChannel channel(group);
//   RankStatus end = channel.exchange({.kind = StatusKind::kEnd});
//   ...  // collectives of the group, which the channel does not touch
//   absl::Status all_agree = check_statuses(channel.await(end));
//
// Without peers (has_peers()), await() returns this rank's status for every
// rank.
//
// Thread safety: statuses are values; a channel takes one call at a time.

#ifndef BRIGADE_COMM_STATUS_STATUS_CHANNEL_H_
#define BRIGADE_COMM_STATUS_STATUS_CHANNEL_H_

#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "brigade/comm/errors/peer_error.h"

namespace brigade {

// ---- Status.

enum class StatusKind : int32_t {
  kBegin,    // begins an iteration
  kAsk,      // begins the action in `text`, if all ranks do
  kEnd,      // launched all collectives of the iteration
  kChained,  // launched the second collectives (then_collective())
  kArrived,  // has all results
  kFailed,   // aborted the iteration
};

// Zero-terminated unless full.
using StatusText = std::array<char, 192>;

// Sent as bytes: ranks run the same build on the same architecture.
struct RankStatus {
  StatusKind kind = StatusKind::kBegin;
  int32_t cannot_continue = 0;  // 1: the sender can launch nothing more
  // 1: the program's own collectives lie between those of an iteration.
  int32_t has_others = 0;
  // 1: if ranks disagree, the sender launches zeros for the collectives of the
  // iteration that only its peers have launched.
  int32_t launches_later = 0;
  int32_t hook_at = 0;    // kBegin: the comm hook's name in `text`; 0: none
  int64_t sequence = 0;   // number of the exchange; set by the channel
  int64_t iteration = 0;  // or iteration_of() a segment (error_texts.h)
  // kFailed: the bucket or unit that failed. In a segment of sharded training:
  // the unit that the sender needs, or the action that begins. -1: none.
  int64_t unit = -1;
  uint64_t fingerprint = 0;  // of plan and options
  uint64_t launched = 0;     // kFailed: hash of the iteration's launches so far

  // Hash of the positions of the program's own collectives in the iteration; 0:
  // not compared.
  uint64_t others = 0;

  // For segments of sharded training (fsdp/segment_exchange.h); not compared.
  uint64_t proposal = 0;
  uint64_t order = 0;

  StatusText text = {};  // an error, or a description of the fingerprint
};

static_assert(std::is_trivially_copyable_v<RankStatus>);

// Copies `words` without a Python stack. Longer texts are cut after a line, or
// between UTF-8 characters and then end in "...".
StatusText status_text(std::string_view words);
std::string_view words_of(const StatusText& text);

// Predicate for "rank 3 ...": "ended iteration 7", "failed in iteration 7 at
// launch 2: division by zero".
std::string describe_status(const RankStatus& rank_status);

// The error of ranks that wait for `rank`.
std::string describe_leaver(int rank, int64_t iteration);

// Returns OK if no rank has failed and kind, iteration, unit, fingerprint and
// `others` are equal on all ranks. Otherwise returns the same text on every
// rank. Aborted: the failed ranks, the place and text of each failure.
// FailedPrecondition: the first field that differs, and each rank's value.
// `remedy`: for ranks in different places.
absl::Status check_statuses(
    std::span<const RankStatus> by_rank,
    const char* remedy =
        "Run the same number of forwards and backwards on every rank, and "
        "forwards without backward under no_grad.");

// Returns true if the groups are unusable after statuses that disagree. A rank
// can't continue, zeros would match the program's own collectives, or a rank
// has launched an iteration that has another plan elsewhere.
bool must_close_groups(std::span<const RankStatus> by_rank);

// ---- Transport.

// Number of exchanges that a rank may have sent and not yet received.
inline constexpr int64_t kMaxStatusesInFlight = 40;

// The awaited status can't arrive. The text names the rank and the reason.
class RankLost : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// One way to exchange statuses. Internal to comm/; tests simulate it.
class StatusTransport {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  // Other ranks that wait for a later exchange then get an error.
  virtual ~StatusTransport() = default;

  // Sends this rank's status of exchange `own.sequence` (1, 2, ...) without
  // blocking. REQUIRES: at most kMaxStatusesInFlight exchanges have not been
  // received.
  virtual void send(const RankStatus& own) = 0;

  // Returns true if receive() would not block.
  virtual bool is_complete(int64_t sequence) = 0;

  // Blocks until all ranks have sent exchange `sequence` and returns their
  // statuses by rank; nullopt at the deadline. Called once per sequence, in any
  // order. Throws RankLost, or the collective's error.
  virtual std::optional<std::vector<RankStatus>> receive(int64_t sequence,
                                                         Deadline deadline) = 0;

  // Ends the waits of other ranks with an error now, before the destructor.
  virtual void abort(const RankStatus& last) = 0;

  // Returns the ranks whose processes are known to have ended.
  virtual std::vector<int> dead_ranks() { return {}; }
};

// Collective. Makes the transport through shared memory, which detects a dead
// rank within a second. Returns null on all ranks unless they share memory.
// Throws as SharedSegment::make().
std::unique_ptr<StatusTransport> make_shared_status_transport(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group);

// Collective. Makes the transport by all-gathers, on a subgroup of all ranks,
// so that they are never matched with the group's other collectives. A group
// written in Python has no subgroups: its own all-gather is used. If the group
// serves devices only, statuses are gathered in device memory and copied to
// pinned memory. Throws as make_subgroup().
std::unique_ptr<StatusTransport> make_gathering_status_transport(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group);

// ---- Channel.

class StatusChannel {
 public:
  // Collective. The timeout is the group's. Throws PeerError if ranks do not
  // connect in time.
  explicit StatusChannel(c10::intrusive_ptr<c10d::ProcessGroup> group);

  // Waits for no peer. Ranks that wait for a later status of this rank get an
  // error "has left". In a forked child, does nothing.
  ~StatusChannel();

  StatusChannel(const StatusChannel&) = delete;
  StatusChannel& operator=(const StatusChannel&) = delete;

  // Sends `own` without blocking, and returns it with `sequence` set. After a
  // failed exchange, throws its PeerError again. Throws RuntimeError in a
  // forked child. REQUIRES: at most kMaxStatusesInFlight exchanges are not
  // awaited.
  RankStatus exchange(RankStatus own);

  // Blocks until all ranks have sent, and returns their statuses by rank. Call
  // it once per exchange. `timeout`: the group's, if that is shorter.
  //
  // Throws PeerError that names a rank that left, died or timed out; a liveness
  // probe may take 1 s more. The channel is unusable then.
  std::vector<RankStatus> await(
      const RankStatus& own,
      std::optional<std::chrono::milliseconds> timeout = std::nullopt);

  // Returns false in a forked child.
  bool is_usable_here() const { return getpid() == process_; }

  // Returns true if await() would not block.
  bool is_complete(const RankStatus& own);

  // Ends the channel after a failure elsewhere. Ranks that wait for a status of
  // this rank get an error that names the lost ranks.
  void abort(const std::exception_ptr& cause);

  // Probes through the group's store which ranks still answer after the group
  // has failed; nullopt without peers. `key`: unique, equal on all ranks.
  // Blocks for at most 1 s.
  std::optional<LivenessProbe> find_survivors(const std::string& key);

  // Prefix of the channel's keys in the group's store; equal on all ranks.
  // Empty without peers.
  const std::string& store_prefix() const { return prefix_; }

 private:
  void connect();
  [[noreturn]] void fail(const RankStatus& own, const std::exception_ptr& cause,
                         std::chrono::milliseconds limit);
  // `text`: in place of a cause.
  [[noreturn]] void fail_with(const std::string& text, const RankStatus& own,
                              const std::exception_ptr& cause = nullptr,
                              const LivenessProbe* probe = nullptr);

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const pid_t process_;
  const std::chrono::milliseconds timeout_;
  std::shared_ptr<StatusTransport> transport_;  // null: no peers
  std::string prefix_;
  RankStatus last_;  // the last one sent
  std::exception_ptr failure_;
};

}  // namespace brigade

#endif  // BRIGADE_COMM_STATUS_STATUS_CHANNEL_H_
