// Asynchronous collectives of CPU tensors whose sums have reproducible bits:
// each element is summed in rank order, wherever it lies in a tensor, so cuts
// between buckets, shards and strategies don't show.
//
//   OrderedCollectives collectives(group);
//   auto reduced = collectives.all_reduce(bucket, 1.0 / world_size);
//   ...                                  // computes meanwhile
//   reduced->wait();
//
// `scale` multiplies the sum once. float16 and bfloat16 are added in float32
// and rounded once.
//
// If all ranks are on one host, data go through memory that they share
// (shared_transport.cc); otherwise by an all-to-all of slices, a local sum, and
// an all-gather, on a Gloo backend beside the group's (group_transport.cc).
//
// *Failure.*  A peer that dies, leaves, stops for longer than the group's
// timeout or, on one host, launches something else ends all calls in flight on
// all ranks with one PeerError, and later ones; so does close_group(). The
// group stays usable.
//
// Thread safety: any thread may call; the calls come in the same order on all
// ranks.

#ifndef BRIGADE_COMM_ORDERED_ORDERED_COLLECTIVES_H_
#define BRIGADE_COMM_ORDERED_ORDERED_COLLECTIVES_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <sys/types.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/comm/group/group_info.h"
#include "brigade/comm/ordered/ordered_sum.h"
#include "brigade/comm/ordered/ordered_transport.h"

namespace brigade {

class OrderedCollectives {
 public:
  using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

  static constexpr int64_t kSharedBytes = int64_t{1} << 28;

  // Collective. Calls time out as the group's.
  //
  // `shared_bytes`: limit of the memory that a rank's unread data take on a
  // host; a call that finds none starts when earlier ones have been read. 0:
  // share no memory. `host`: ranks with another number count as ranks of
  // another host, for tests.
  //
  // Errors: ValueError if the group has several ranks and no store; PeerError
  // if ranks don't meet.
  explicit OrderedCollectives(
      const c10::intrusive_ptr<c10d::ProcessGroup>& group,
      int64_t shared_bytes = kSharedBytes, int64_t host = 0);

  // Calls in flight end with an error, here and on the other ranks. REQUIRES:
  // not from a callback of one of its futures. In a forked child, leaves
  // everything to the parent.
  ~OrderedCollectives();

  OrderedCollectives(const OrderedCollectives&) = delete;
  OrderedCollectives& operator=(const OrderedCollectives&) = delete;

  // Replaces `tensor` [any shape] by the sum over ranks, times `scale`; no
  // scale for integers. The future holds a list of the tensor, as c10d's do, or
  // ends with PeerError; its callbacks run on a thread that later calls need.
  // Starts when `after` is complete, if given, and fails with it; so do later
  // calls.
  //
  // Errors: ValueError for a tensor that is not contiguous, not on the CPU or
  // lazily conjugated; TypeError for a dtype that can't be added; RuntimeError
  // in a forked child.
  FuturePtr all_reduce(const at::Tensor& tensor,
                       std::optional<double> scale = std::nullopt,
                       const FuturePtr& after = {});

  // Writes into `output` the sum over ranks of this rank's slice of `input`
  // [any shape]: elements slice(input.numel()). `output` may be that part of
  // `input`, which is otherwise left unchanged, and overlaps no other. The
  // future holds a list of the output. Errors: as all_reduce().
  FuturePtr reduce_scatter(const at::Tensor& input, const at::Tensor& output,
                           std::optional<double> scale = std::nullopt);

  // Copies each rank's slice of `whole` [any shape, any dtype], elements
  // slice(whole.numel()), to the other ranks. The future holds a list of the
  // tensor. Errors: as all_reduce().
  FuturePtr all_gather(const at::Tensor& whole);

  // Ends calls in flight and later ones with an error that contains the cause,
  // here and on the other ranks.
  void abort(const std::exception_ptr& cause) noexcept;

  // Aborts all ordered collectives of the group in this process.
  static void abort_all_of(const c10d::ProcessGroup& group,
                           const std::exception_ptr& cause);

  // This rank's slice of n elements.
  RankSlice slice(int64_t numel) const {
    return slice_of_rank(numel, ranks_.rank, ranks_.size);
  }

  // Whether an error ends all calls from here on.
  bool has_failed() const { return failure() != nullptr; }

  // Whether all ranks share memory. The same on all ranks.
  bool is_on_one_host() const { return is_on_one_host_; }

 private:
  struct OfGroup;
  struct InFlight {
    int64_t number;  // of the calls
    OrderedCall call;
    std::unique_ptr<OrderedOperation> operation;
    at::Tensor result;
    FuturePtr future;
  };

  FuturePtr launch(OrderedCall call, const at::Tensor& result);
  void work();
  void finish(InFlight launched);
  std::string describe(const InFlight& launched) const;
  std::exception_ptr failure() const;
  void check_process() const;
  // Without a cause, the context is the whole story.
  std::exception_ptr failure_of(std::string_view context,
                                const std::exception_ptr& cause) const noexcept;
  // The one that all calls get from here on: that of the first failure.
  std::exception_ptr fail(std::string_view context,
                          const std::exception_ptr& cause) noexcept;

  // Constant after construction.
  const RankNames names_;
  const OrderedRanks ranks_;
  const pid_t process_;
  const std::shared_ptr<OfGroup> of_group_;
  bool is_on_one_host_ = true;
  std::unique_ptr<OrderedTransport> transport_;  // null: a world of 1

  mutable std::mutex mutex_;
  std::unique_ptr<std::condition_variable> changed_ =
      std::make_unique<std::condition_variable>();
  // Guarded by mutex_.
  int64_t num_launches_ = 0;
  int num_in_flight_ = 0;
  std::deque<InFlight> queue_;
  std::exception_ptr failure_;
  bool is_ending_ = false;

  std::vector<std::thread> threads_;
};

}  // namespace brigade

#endif  // BRIGADE_COMM_ORDERED_ORDERED_COLLECTIVES_H_
