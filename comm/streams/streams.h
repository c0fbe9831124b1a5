// Streams of a device beside those that a program computes on, and how they
// wait for each other. On the CPU there are no streams and nothing waits.

#ifndef BRIGADE_COMM_STREAMS_STREAMS_H_
#define BRIGADE_COMM_STREAMS_STREAMS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace brigade {

// The calling thread's current stream. REQUIRES: a device with streams.
c10::Stream current_stream(c10::Device device);

// A stream of high priority from the process's pool: the little that runs there
// delays a collective. REQUIRES: a device with streams.
c10::Stream side_stream(c10::Device device);

// The same; none for devices without streams (CPU).
std::optional<c10::Stream> side_stream_if_any(c10::Device device);

// The allocator is told that the current stream uses `memory`, which may be
// dropped from here on.
void record_use(const at::Tensor& memory);

// An event on each of some streams of one device. Default: none.
//
// Thread safety: values, which share their events; no event is recorded twice.
class StreamPoint {
 public:
  StreamPoint() = default;

  // After the work that these streams have so far.
  static StreamPoint of(std::span<const c10::Stream> streams);
  // The same of the calling thread's current stream of `device`.
  static StreamPoint now(c10::Device device);

  // The calling thread's current stream waits for it. The host does not.
  void wait() const;

 private:
  // Null: none.
  std::shared_ptr<const std::vector<std::pair<c10::Stream, c10::Event>>>
      events_;
};

// The streams that use some memory, or have written parts of it.
//
// Thread safety: none.
class StreamUses {
 public:
  explicit StreamUses(c10::Device device) : device_(device) {}

  // Adds the calling thread's current stream. Returns whether it is new.
  bool note();

  bool empty() const { return streams_.empty(); }
  bool has_current() const;

  // The calling thread's current stream waits for the work of the others.
  // Returns whether there are others.
  bool join() const;

  // After the work of all of them. None is left.
  StreamPoint end();
  void forget() { streams_.clear(); }

  // A caching allocator is told of all of them: `memory` may be dropped.
  void record_on(const at::Tensor& memory) const;

 private:
  c10::Device device_;
  std::vector<c10::Stream> streams_;  // distinct
};

}  // namespace brigade

#endif  // BRIGADE_COMM_STREAMS_STREAMS_H_
