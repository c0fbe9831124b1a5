// Moves and adds the tensors of ordered collectives: through memory that all
// ranks share, or by messages of a c10d backend. Internal to comm/.

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
  at::Tensor output;  // [n], the input itself; of a reduce-scatter: the slice
  std::optional<double> scale;
  FuturePtr after;  // fills `input`; null: it is filled
};

struct OrderedRanks {
  int rank;
  int size;  // > 1
  std::chrono::milliseconds timeout;
  RankNames names = {};  // in errors
};

// A call in flight. Its destructor waits for nobody.
class OrderedOperation {
 public:
  virtual ~OrderedOperation() = default;

  // Blocks until the output is complete. Errors: RuntimeError, and the
  // backend's.
  virtual void finish() = 0;

  // The rank that finish() waits for, -1: not known. Any thread.
  virtual int awaited() const { return -1; }
};

// Thread safety: start() is called in the same order on all ranks, one call at
// a time; each operation's finish() by one of several threads, which begin them
// in the order of start(); abort() from any thread.
class OrderedTransport {
 public:
  virtual ~OrderedTransport() = default;

  // Waits for no peer.
  virtual std::unique_ptr<OrderedOperation> start(const OrderedCall& call) = 0;

  // Ends all operations with an error, here and on the other ranks.
  virtual void abort(std::string_view reason) = 0;
};

// Size of each rank's region in the segment, for `room` bytes of posts.
size_t shared_bytes_per_rank(size_t room);

// Each rank copies its terms into its region at start, or as soon as there is
// room, adds up what the peers have posted there, and posts the sums. REQUIRES:
// the room fits 4 elements of each rank.
std::unique_ptr<OrderedTransport> make_shared_transport(
    std::shared_ptr<SharedSegment> segment, size_t room,
    const OrderedRanks& ranks);

// An all-to-all of the terms' bytes, a sum, and an all-gather of the sums.
// Nothing else uses the backend, whose ranks are connected.
std::unique_ptr<OrderedTransport> make_group_transport(
    c10::intrusive_ptr<c10d::Backend> backend, const OrderedRanks& ranks);

}  // namespace brigade

#endif  // BRIGADE_COMM_ORDERED_ORDERED_TRANSPORT_H_
