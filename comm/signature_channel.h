// Exchanges signatures between the ranks of a group, beside the collectives
// that they speak of.
//
// Decides how signatures travel, how long they are waited for, and what a rank
// is told whose peer has left or died.  What they mean is decided by those who
// send them (docs/protocol.md, "Signatures").
//
//   SignatureChannel channel(group);
//   SignatureTicket end = channel.exchange({.kind = SignatureKind::kEnd,
//                                           .iteration = 7,
//                                           .launches = 3});
//   ...  // the collectives go on
//   absl::Status equal = check_signatures(channel.await(end));
//
// The channel is a Gloo group of its own, with one thread.  All signatures have
// one size, so that nothing clashes there whatever ranks do: the n-th exchange
// of one rank meets the n-th of every other.  Nothing is copied to or from a
// GPU, and no stream is touched.
//
// A world of 1 answers itself.  So does a group without a store, with its own
// signature for every rank: its ranks are taken to be identical.
//
// Thread safety: any thread may call.  The order of exchanges is that of the
// calls, so they must come in the same order on every rank.

#ifndef BRIGADE_COMM_SIGNATURE_CHANNEL_H_
#define BRIGADE_COMM_SIGNATURE_CHANNEL_H_

#include <ATen/core/Tensor.h>
#include <sys/types.h>

#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/comm/rank_signature.h"

namespace brigade {

class AnswersSignatures;

// One exchange.  Keep it until it has been awaited; it may outlive the channel.
struct SignatureTicket {
  RankSignature own = {};
  at::Tensor received = {};  // uint8, [world_size, sizeof(RankSignature)]
  c10::intrusive_ptr<c10d::Work> work = {};  // null: answered at once
};

class SignatureChannel {
 public:
  // Collective.  Ranks make their channels on a group in the same order.  Its
  // timeout is the group's.  Errors: PeerError if ranks don't meet in time.
  explicit SignatureChannel(c10::intrusive_ptr<c10d::ProcessGroup> group);

  // Never waits for a peer.  Exchanges in flight end with an error, here and on
  // the ranks that wait for this one; those are told that this rank has left.
  // In a forked child, leaves everything to the parent.
  ~SignatureChannel();

  SignatureChannel(const SignatureChannel&) = delete;
  SignatureChannel& operator=(const SignatureChannel&) = delete;

  // Sends `own` to every rank, with `sequence` and `group_launches` filled in,
  // and returns at once.
  //
  // Errors: PeerError, the one of before, when an exchange has failed;
  // RuntimeError in a forked child.
  SignatureTicket exchange(RankSignature own);

  // Whether await() would return, or throw, at once.  Never blocks.  Not for
  // deciding what to launch: the answer differs from rank to rank.
  bool arrived(const SignatureTicket& ticket) const;

  // Waits for all ranks' signatures, and returns them by rank.
  //
  // Errors: PeerError if a rank has left, died or not come within the timeout:
  // which ranks, what this one waited for.  The channel is of no use then.  The
  // first failure takes up to 3 s to find out who is still there.
  std::vector<RankSignature> await(const SignatureTicket& ticket);

  // All ranks stand in the same place now: what they owed has been launched.
  // Later signatures count from here.
  void count_from_here();

 private:
  // Tensors of an exchange that is over, for the next one.
  struct Buffers {
    at::Tensor sent;      // uint8, [1, sizeof(RankSignature)]
    at::Tensor received;  // uint8, [world_size, sizeof(RankSignature)]
  };

  void connect();
  void check_process() const;
  Buffers& free_buffers();
  [[noreturn]] void fail(const SignatureTicket& ticket,
                         const std::exception_ptr& cause);
  void leave();

  // Constant after construction.
  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const pid_t process_;
  std::string roll_key_;                       // equal on all ranks
  c10::intrusive_ptr<c10d::Backend> backend_;  // null: nobody to talk to
  AnswersSignatures* answers_ = nullptr;       // owned by group_

  mutable std::mutex mutex_;
  // Guarded by mutex_.
  RankSignature last_;  // that was sent
  c10::intrusive_ptr<c10d::Work> last_work_;
  std::optional<int64_t> group_count_;  // where all stood last, if it counts
  std::vector<Buffers> buffers_;
  std::exception_ptr failure_;
};

}  // namespace brigade

#endif  // BRIGADE_COMM_SIGNATURE_CHANNEL_H_
