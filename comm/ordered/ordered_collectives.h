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
// Functions write to their outputs only.

#ifndef BRIGADE_COMM_ORDERED_ORDERED_COLLECTIVES_H_
#define BRIGADE_COMM_ORDERED_ORDERED_COLLECTIVES_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <sys/types.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/comm/group/group_info.h"
#include "brigade/comm/group/shared_segment.h"

namespace brigade {

// ---- Slices and sums.
//
// The bits of an element's sum depend on its terms alone, not on its position,
// the vector's length or threads.

struct RankSlice {
  int64_t offset;
  int64_t numel;
};

// Returns the slice of a rank. Slices are contiguous, in rank order, and differ
// in length by at most one; the first ranks have the longer ones.
//
//   10 elements, 4 ranks: [0, 3) [3, 6) [6, 8) [8, 10)
constexpr RankSlice slice_of_rank(int64_t numel, int rank, int world_size) {
  const int64_t shorter = numel / world_size;
  const int64_t num_longer = numel % world_size;
  return {.offset = rank * shorter + std::min<int64_t>(rank, num_longer),
          .numel = shorter + (rank < num_longer ? 1 : 0)};
}

// Returns true for integers (which wrap around), floating-point and complex
// numbers; false for bool and quantized types.
inline bool can_add(at::ScalarType dtype) {
  constexpr std::array kDtypes = {
      at::kByte,   at::kChar,         at::kShort,        at::kInt,
      at::kLong,   at::kHalf,         at::kBFloat16,     at::kFloat,
      at::kDouble, at::kComplexFloat, at::kComplexDouble};
  return std::ranges::find(kDtypes, dtype) != kDtypes.end();
}

// Writes the sum of `terms` ([n] each, at least one) to `out` [n], in order and
// in one pass, times `scale` if given. float16 and bfloat16 are summed in
// float32 and rounded once, at the end.
//
// `out` may be one of `terms`, and overlaps no other.
//
// REQUIRES: contiguous CPU tensors of one dtype that can_add(); no scale for
// integers.
void ordered_sum(std::span<const at::Tensor> terms, std::optional<double> scale,
                 const at::Tensor& out);

// Returns an uninitialized accumulator [numel] for sum_in_order(): in the dtype
// of `like`, or float32 for float16 and bfloat16.
at::Tensor empty_sum(int64_t numel, const at::Tensor& like);

// Sums `count` consecutive vectors of `terms` [count * n] in order into `sum`
// [n], on the current stream of their device. Allocates no memory.
void sum_in_order(const at::Tensor& terms, int count, const at::Tensor& sum);

// ---- Transports: shared memory, or messages of a c10d backend. Internal to
// comm/.

enum class OrderedKind { kAllReduce, kReduceScatter, kAllGather };

struct OrderedCall {
  using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

  OrderedKind kind = OrderedKind::kAllReduce;
  at::Tensor input;   // [n], n > 0
  at::Tensor output;  // [n], the input itself; reduce-scatter: the slice
  std::optional<double> scale;
  FuturePtr after;  // start after this future; null: at once
};

struct OrderedRanks {
  int rank;
  int size;  // > 1
  std::chrono::milliseconds timeout;
  RankNames names = {};  // in errors
  // Number of ranks on each host, which are consecutive; 1 also if hosts differ
  // in it or are unknown.
  int ranks_per_host = 1;
};

// A call in flight. Its destructor does not block.
class OrderedOperation {
 public:
  virtual ~OrderedOperation() = default;

  // Blocks until the output is complete. Throws RuntimeError, and the backend's
  // errors.
  virtual void finish() = 0;

  // Returns the rank that finish() waits for; -1: unknown. Any thread.
  int awaited() const { return awaited_; }

 protected:
  std::atomic<int> awaited_ = -1;
};

// Thread safety: start() is called by one thread at a time, in the same order
// on all ranks. Several threads call finish(), each for one operation, and
// begin them in the order of start(). Any thread calls abort().
class OrderedTransport {
 public:
  virtual ~OrderedTransport() = default;

  // Does not wait for peers.
  virtual std::unique_ptr<OrderedOperation> start(const OrderedCall& call) = 0;

  // Ends all operations with an error, here and on the other ranks.
  virtual void abort(std::string_view reason) = 0;
};

// Returns the size of a rank's region in the segment for `room` bytes of posts.
size_t shared_bytes_per_rank(size_t room);

// Makes the transport through shared memory. Each rank posts its terms in its
// region, sums its slice, and posts the sum. REQUIRES: `room` fits 4 elements
// of each rank.
std::unique_ptr<OrderedTransport> make_shared_transport(
    std::shared_ptr<SharedSegment> segment, size_t room,
    const OrderedRanks& ranks);

// Makes the transport by messages: an all-to-all of the terms, a sum, and an
// all-gather of the sums. REQUIRES: all ranks of `backend` are connected, and
// it has no other users.
std::unique_ptr<OrderedTransport> make_group_transport(
    c10::intrusive_ptr<c10d::Backend> backend, const OrderedRanks& ranks);

// ---- Collectives.

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
