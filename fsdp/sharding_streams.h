// Streams of a device in sharding: which collectives run on which, which
// streams have used memory, and points in them to wait for. On the CPU there
// are no streams and nothing waits. What waits for what:
// docs/sharding_streams.md.

#ifndef BRIGADE_FSDP_SHARDING_STREAMS_H_
#define BRIGADE_FSDP_SHARDING_STREAMS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace brigade {

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
  void join() const;

  // After the work of all of them. None is left.
  StreamPoint end();
  void forget() { streams_.clear(); }

  // A caching allocator is told of all of them: `memory` may be dropped.
  void record_on(const at::Tensor& memory) const;

 private:
  c10::Device device_;
  std::vector<c10::Stream> streams_;  // distinct
};

// The streams that a model launches its collectives on: one for gathers and one
// for sums, so that neither waits for the program's computation nor for the
// other.
//
// Thread safety: any thread; guards belong to one.
class ShardingStreams {
 public:
  explicit ShardingStreams(c10::Device device);

  c10::Device device() const { return device_; }

  // While the guard lives the stream is the calling thread's current one.
  c10::OptionalStreamGuard for_gathers() const {
    return c10::OptionalStreamGuard(gathers_);
  }
  c10::OptionalStreamGuard for_sums() const {
    return c10::OptionalStreamGuard(sums_);
  }

 private:
  c10::Device device_;
  std::optional<c10::Stream> gathers_;
  std::optional<c10::Stream> sums_;
};

// A stream that the process has for such purposes. None on the CPU.
std::optional<c10::Stream> stream_beside_the_program(c10::Device device);

}  // namespace brigade

#endif  // BRIGADE_FSDP_SHARDING_STREAMS_H_
