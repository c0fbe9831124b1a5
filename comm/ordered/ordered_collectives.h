// Reductions whose bits are a function of the ranks' values alone: an element
// is summed in the order of the ranks, wherever it lies in whatever it is sent
// in, so that the cuts between buckets, shards and strategies don't show.
// Gloo's own all-reduce adds in an order that depends on where an element lies;
// it has no reduce-scatter that sends less than an all-reduce.
//
//   OrderedCollectives collectives(group);
//   auto reduced = collectives.all_reduce(bucket, 1.0 / world_size);
//   ...                                  // computes meanwhile
//   reduced->wait();
//
// *Order.*  Rank 0's value first, then rank 1's and so on; with a group size of
// F, for the order of a 2-D mesh, those of ranks 0..F-1, of F..2F-1 and so on
// each by itself, then these sums.  `scale` multiplies the sum, once.  float16
// and bfloat16 are added in float32 and rounded once at the end of each level:
// rounding after every rank would lose small gradients beside large ones, with
// W as many roundings, and costs the same bytes.  Sent is the tensor's own
// dtype, so a level is rounded where its sum would travel between two groups,
// and one call with F gives the bits of one after the other.
//
// *How.*  Every rank sends each other one its slice, adds up what it gets, and
// sends the sum back (comm/ordered/ordered_reduction.h): a ring's bytes, in two
// steps instead of 2(W-1).  Ranks of one host read each other's in memory that
// they share (comm/ordered/host_messages.h); sums come to each other host once
// (comm/ordered/host_relays.h).  Messages to others go over
// connections of their own among the group's ranks: tags can't collide with the
// user's sends, a failure here leaves the group usable, and the group's own
// count of collectives (comm/collective_count.h) does not move: sends and
// receives would move it at a time that depends on arrivals.  Who compares
// counts of launches across ranks counts calls here by itself: num_launches().
//
// *Who waits.*  Nobody who calls.  Two threads take the reductions in the order
// of the calls, and each sees one to its end: one waits for the sums of the one
// while the other adds up the next.  All that a rank can send without knowing a
// sum is sent by the call, so a peer never waits for these threads to get to
// it. (c10d's sends and receives have no futures, so somebody must wait for
// each; one thread would leave the connections idle while it waits for the last
// sums.  A socket loop of our own, as the statuses have it, would need no
// thread to wait, but be a second transport for bulk data.)  No two ranks wait
// for each other: the first reduction that is not done on some rank has a
// thread on every one.
//
// *Failure.*  A peer that dies, leaves, stops for longer than the group's
// timeout or launches something else ends all reductions in flight on all ranks
// with one PeerError, and so later ones; the group's other use goes on.  Each
// rank watches the next one by a receive that is answered only by its leaving;
// without that, Gloo would not tell of a death in the middle of a message.  A
// rank that fails closes its connections, which its watcher sees, and so on
// around.  After a failure tensors in flight are kept, and may be written to,
// until the object ends.
//
// Thread safety: any thread may call; the calls come in the same order on all
// ranks.

#ifndef BRIGADE_COMM_ORDERED_ORDERED_COLLECTIVES_H_
#define BRIGADE_COMM_ORDERED_ORDERED_COLLECTIVES_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <sys/types.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/comm/group/channel_identity.h"
#include "brigade/comm/group/rank_names.h"
#include "brigade/comm/ordered/ordered_kind.h"
#include "brigade/comm/ordered/rank_slice.h"

namespace brigade {

class HostMessages;
class OrderedReduction;

// Equal on all ranks.
struct OrderedOptions {
  // See above; none: all ranks are one group.
  std::optional<int> group_size = {};
  // What is added while the next part comes, > 0: large enough that a message's
  // cost is lost in it, small enough to be in the cache still.
  int64_t part_bytes = int64_t{1} << 20;
  // Room for what a rank has for others of its host, which have not read it
  // yet, and which takes so much memory at most; beyond that messages travel as
  // to other hosts. 0: all do.
  int64_t shared_bytes = int64_t{1} << 28;
  // Ranks with another number share no memory with this one, and are taken for
  // ranks of another host. What is found out besides counts, too.  The one
  // option that may differ between ranks.
  int64_t host = 0;
};

class OrderedCollectives {
 public:
  using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

  // Collective: connects all ranks of the group, unless it has one only.  The
  // timeout is the group's.  Without an identity, ranks make these in the same
  // order.
  //
  // Errors: ValueError if the group size does not divide the number of ranks, a
  // part has no bytes, or the group has several ranks and no store; PeerError
  // if ranks don't meet.
  explicit OrderedCollectives(
      const c10::intrusive_ptr<c10d::ProcessGroup>& group,
      OrderedOptions options = {},
      std::optional<ChannelIdentity> identity = std::nullopt);

  // Reductions in flight end with an error, here and on the other ranks.
  // REQUIRES: not from a callback of one of its futures
  // (comm/backends/end_on_own_thread.h).  In a forked child, leaves everything
  // to the parent.
  ~OrderedCollectives();

  OrderedCollectives(const OrderedCollectives&) = delete;
  OrderedCollectives& operator=(const OrderedCollectives&) = delete;

  // Replaces `tensor` [any shape] by the sum over ranks, times `scale`.  The
  // future holds a list of the tensor, as c10d's do, or ends with PeerError;
  // its callbacks run on a thread that is to wait for the next reduction.
  //
  // Errors: ValueError for a tensor that is not contiguous, not on the CPU or
  // lazily conjugated, and for a scale of integers; TypeError for a dtype that
  // can't be added; RuntimeError in a forked child.
  FuturePtr all_reduce(const at::Tensor& tensor,
                       std::optional<double> scale = std::nullopt);

  // Writes into `output` the sum over ranks of this rank's slice of `input`
  // [any shape]: elements slice(input.numel()).  `output` may be just that part
  // of `input`, which is left as it is else.  The future holds a list of the
  // output.
  //
  // Errors: as all_reduce(); ValueError if the output has another length or
  // dtype, or overlaps the input elsewhere.
  FuturePtr reduce_scatter(const at::Tensor& input, const at::Tensor& output,
                           std::optional<double> scale = std::nullopt);

  // Each rank's slice of `whole` [any shape, any dtype] holds what is to come
  // there on all ranks: elements slice(whole.numel()).  Writes the others'
  // slices.  The future holds a list of the tensor.
  //
  // Errors: as all_reduce().
  FuturePtr all_gather(const at::Tensor& whole);

  // What reduce_scatter() does before it calls anybody.
  void check_reduce_scatter(const at::Tensor& input, const at::Tensor& output,
                            std::optional<double> scale) const;

  // Reductions in flight and later ones end with an error that tells the cause,
  // here and on the other ranks.
  void abort(const std::exception_ptr& cause) noexcept;

  // Of this rank, of n elements in a row.
  RankSlice slice(int64_t numel) const {
    return slice_of_rank(numel, rank_, size_);
  }

  // Whether all ranks are on one host, and nothing travels over connections but
  // what the memory that they share has no room for. The same on all ranks.
  bool is_on_one_host() const;

  // Whether an error ends all calls from here on.
  bool has_failed() const;

  // Calls so far, of tensors that are not empty.
  int64_t num_launches() const;

  // Bytes that others have got from this rank in calls that are over, over
  // connections or in shared memory.
  int64_t sent_bytes(OrderedKind kind) const;

 private:
  struct Launched {
    std::shared_ptr<OrderedReduction> reduction;
    FuturePtr future;
  };

  FuturePtr launch(OrderedKind kind, const at::Tensor& input,
                   const at::Tensor& output, std::optional<double> scale);
  void post(const Launched& launched);
  void work();
  void finish(Launched launched);
  void watch();
  std::string describe_loss() const;
  void say_goodbye();
  void check_process() const;
  at::Tensor take_scratch(int64_t bytes);
  // Without a cause, the context is the whole story.
  std::exception_ptr failure_of(std::string_view context,
                                const std::exception_ptr& cause) const noexcept;
  // The one that all get from here on: that of the first call.
  std::exception_ptr fail(std::string_view context,
                          const std::exception_ptr& cause) noexcept;

  // Constant after construction.
  const int rank_;
  const int size_;
  const RankNames names_;
  const int group_size_;
  const int64_t part_bytes_;
  const std::chrono::milliseconds timeout_;
  const pid_t process_;
  c10::intrusive_ptr<c10d::Backend> backend_;  // null: a world of 1
  std::unique_ptr<HostMessages> host_;
  c10::intrusive_ptr<c10d::Work> departure_;  // of the next rank

  mutable std::mutex mutex_;
  std::unique_ptr<std::condition_variable> changed_ =
      std::make_unique<std::condition_variable>();
  // Guarded by mutex_.
  int64_t num_launches_ = 0;
  std::deque<Launched> queue_;
  std::list<std::shared_ptr<OrderedReduction>> in_flight_;
  std::vector<std::shared_ptr<OrderedReduction>> abandoned_;
  std::vector<at::Tensor> free_scratch_;    // uint8
  std::array<int64_t, 3> sent_bytes_ = {};  // by kind
  std::exception_ptr failure_;
  bool is_ending_ = false;

  std::vector<std::thread> threads_;
};

}  // namespace brigade

#endif  // BRIGADE_COMM_ORDERED_ORDERED_COLLECTIVES_H_
