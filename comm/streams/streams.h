// Device streams, events on them, and the futures of collectives. A CPU has no
// streams, and calls for it wait for nothing.
//
// Thread safety: the functions may be called from any thread.

#ifndef BRIGADE_COMM_STREAMS_STREAMS_H_
#define BRIGADE_COMM_STREAMS_STREAMS_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

namespace brigade {

// REQUIRES: a device with streams.
c10::Stream current_stream(c10::Device device);

// Returns a stream of the process's pool, with high priority, because a
// collective waits for the work on it. REQUIRES: a device with streams.
c10::Stream side_stream(c10::Device device);

// Returns nullopt for devices without streams (CPU).
std::optional<c10::Stream> side_stream_if_any(c10::Device device);

// Records in the caching allocator that the current stream uses `memory`, so
// that the caller may drop it.
void record_use(const at::Tensor& memory);

// Events on streams of one device. Default: no event.
//
// Thread safety: a value; copies share their events, none of which is recorded
// twice.
class StreamPoint {
 public:
  StreamPoint() = default;

  // Records an event on each stream, after its work so far.
  static StreamPoint of(std::span<const c10::Stream> streams);
  // Records an event on the current stream of `device`.
  static StreamPoint now(c10::Device device);

  // Makes the current stream wait for the events; does not block the host.
  void wait() const;

 private:
  // Null: no event.
  std::shared_ptr<const std::vector<std::pair<c10::Stream, c10::Event>>>
      events_;
};

// The set of streams that read or write some memory.
//
// Thread safety: none.
class StreamUses {
 public:
  explicit StreamUses(c10::Device device) : device_(device) {}

  // Adds the current stream. Returns true if it is new.
  bool add_current();

  bool empty() const { return streams_.empty(); }
  bool has_current() const;

  // Makes the current stream wait for the other streams. Returns true if there
  // are any.
  bool wait() const;

  // Records an event on each stream and empties the set.
  StreamPoint end();
  void forget() { streams_.clear(); }

  // record_use() for all streams of the set.
  void record_on(const at::Tensor& memory) const;

 private:
  c10::Device device_;
  std::vector<c10::Stream> streams_;  // distinct
};

// Returns a completed future that holds a list of the tensors, like a
// collective's. A stream that waits for it waits for the current streams of the
// tensors' devices.
c10::intrusive_ptr<c10::ivalue::Future> completed_future(
    const std::vector<at::Tensor>& tensors);

// Returns work->getFuture(), called on another stream. In torch 2.15's new NCCL
// backend that call makes the current stream wait for the collective, which
// would end the overlap with backward.
//
// `tensor`: the work's output. Keep it until the stream that it was allocated
// on has waited for the future. Throws like getFuture(), which some backends do
// not implement.
c10::intrusive_ptr<c10::ivalue::Future> future_of(
    const c10::intrusive_ptr<c10d::Work>& work, const at::Tensor& tensor);

// Blocks until `future` is completed or the timeout expires. Returns true if it
// is completed.
bool wait_for(c10::ivalue::Future& future, std::chrono::milliseconds timeout);

}  // namespace brigade

#endif  // BRIGADE_COMM_STREAMS_STREAMS_H_
