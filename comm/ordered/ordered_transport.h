// Transports of ordered collectives: shared memory, or messages of a c10d
// backend. Internal to comm/.

#ifndef BRIGADE_COMM_ORDERED_ORDERED_TRANSPORT_H_
#define BRIGADE_COMM_ORDERED_ORDERED_TRANSPORT_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "brigade/comm/group/group_info.h"
#include "brigade/comm/group/shared_segment.h"
#include "brigade/comm/ordered/ordered_sum.h"

namespace brigade {

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
  virtual int awaited() const { return -1; }
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

}  // namespace brigade

#endif  // BRIGADE_COMM_ORDERED_ORDERED_TRANSPORT_H_
