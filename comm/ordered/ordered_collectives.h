// Asynchronous collectives of CPU tensors that sum each element in rank order.
// The bits do not depend on buckets or shards.
//
//   OrderedCollectives collectives(group);
//   auto reduced = collectives.all_reduce(bucket, 1.0 / world_size);
//   ...                                  // overlapped computation
//   reduced->wait();
//
// `scale` multiplies the sum once. float16 and bfloat16 are summed in float32
// and rounded once.
//
// Data go through shared memory if all ranks are on one host, otherwise through
// a second Gloo backend.
//
// *Failure.*  All calls in flight and later ones end on all ranks with one
// PeerError if a peer dies, leaves, stops for longer than the group's timeout
// or, on one host, makes another call; and after close_group(). The group stays
// usable.
//
// Thread safety: any thread; all ranks make the same calls in the same order.

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

  // Collective. The timeout is the group's.
  //
  // `shared_bytes`: limit of a rank's data in shared memory that peers have not
  // read; later calls wait for room. 0: no shared memory. `host`, for tests:
  // ranks with different values count as different hosts.
  //
  // Errors: ValueError if the group has several ranks and no store; PeerError
  // if ranks do not connect.
  explicit OrderedCollectives(
      const c10::intrusive_ptr<c10d::ProcessGroup>& group,
      int64_t shared_bytes = kSharedBytes, int64_t host = 0);

  // Ends calls in flight with an error on all ranks. In a forked child, does
  // nothing. REQUIRES: not called by a callback of one of its futures.
  ~OrderedCollectives();

  OrderedCollectives(const OrderedCollectives&) = delete;
  OrderedCollectives& operator=(const OrderedCollectives&) = delete;

  // Replaces `tensor` [any shape] by the sum over ranks, times `scale` (not for
  // integers). The future holds a list of the tensor, like c10d's, or a
  // PeerError. Its callbacks run on a thread that later calls need, here and on
  // the other ranks. If `after` is given, starts when that is complete; its
  // failure fails this call and later ones.
  //
  // Errors: ValueError for a tensor that is not contiguous, not on the CPU or
  // lazily conjugated; TypeError for a dtype that can't be added; RuntimeError
  // in a forked child.
  FuturePtr all_reduce(const at::Tensor& tensor,
                       std::optional<double> scale = std::nullopt,
                       const FuturePtr& after = {});

  // Sums elements slice(input.numel()) of `input` [any shape] over ranks into
  // `output`, which may be that slice and overlaps no other part of `input`.
  // The rest of `input` is unchanged. The future holds a list of the output.
  // Errors: as all_reduce().
  FuturePtr reduce_scatter(const at::Tensor& input, const at::Tensor& output,
                           std::optional<double> scale = std::nullopt);

  // Copies elements slice(whole.numel()) of each rank's `whole` [any shape, any
  // dtype] to the other ranks. The future holds a list of the tensor. Errors:
  // as all_reduce().
  FuturePtr all_gather(const at::Tensor& whole);

  // Ends calls in flight and later ones on all ranks with an error that
  // contains the cause.
  void abort(const std::exception_ptr& cause) noexcept;

  // Aborts all instances of the group in this process.
  static void abort_all_of(const c10d::ProcessGroup& group,
                           const std::exception_ptr& cause);

  RankSlice slice(int64_t numel) const {
    return slice_of_rank(numel, ranks_.rank, ranks_.size);
  }

  bool has_failed() const { return failure() != nullptr; }

  // Returns true, on all ranks, if all ranks share memory.
  bool is_on_one_host() const { return is_on_one_host_; }

 private:
  struct OfGroup;
  struct InFlight {
    int64_t number;  // of the call, from 1
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
  // Without a cause, the context is the complete text.
  std::exception_ptr failure_of(std::string_view context,
                                const std::exception_ptr& cause) const noexcept;
  // Returns the first failure, which all later calls get too.
  std::exception_ptr fail(std::string_view context,
                          const std::exception_ptr& cause) noexcept;

  // Constant after construction.
  OrderedRanks ranks_;
  const pid_t process_;
  const std::shared_ptr<OfGroup> of_group_;
  bool is_on_one_host_ = true;
  std::unique_ptr<OrderedTransport> transport_;  // null in a world of 1

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
