// Streams of a device in sharding: which collectives run on which, which
// streams have used memory, and points in them to wait for. On CPUs nothing
// waits.

#ifndef BRIGADE_FSDP_STREAMS_H_
#define BRIGADE_FSDP_STREAMS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace brigade {

// A moment in the work of some streams of one device: whatever waits for it is
// behind all that they had been given then. On the CPU there is none, and
// nobody waits.
//
// Thread safety: values, which share their events; nothing changes an event
// once it is recorded.
class StreamPoint {
 public:
  // Nothing is behind it.
  StreamPoint() = default;

  // What these have been given so far.
  static StreamPoint of(std::span<const c10::Stream> streams);
  // Of the calling thread's current stream of `device`.
  static StreamPoint now(c10::Device device);

  // The calling thread's current stream is behind it from here on. The host
  // does not wait.
  void wait() const;

 private:
  struct Events;
  std::shared_ptr<const Events> events_;  // null: none
};

// The streams that use some memory, or have written parts of it. On the CPU
// there are none.
//
// Thread safety: none.
class StreamUses {
 public:
  explicit StreamUses(c10::Device device) : device_(device) {}

  // The calling thread's current stream is one of them. Returns whether it is a
  // new one.
  bool note();
  // The same of any stream of the device.
  bool note(const c10::Stream& stream);

  bool empty() const { return streams_.empty(); }
  bool has_current() const;

  // The calling thread's current stream is behind what the others have been
  // given so far.
  void join() const;

  // Of all of them, each with what it has been given so far. None is left.
  StreamPoint end();
  void forget() { streams_.clear(); }

  // A caching allocator is told of all of them: `memory` may be dropped.
  void record_on(const at::Tensor& memory) const;

 private:
  const c10::Device device_;
  std::vector<c10::Stream> streams_;  // distinct
};

// The streams that a root launches its collectives on: one for gathers and one
// for sums, so that neither waits for what a program computes beside it, nor
// for the other. On the CPU there are none.
//
// What is behind what: docs/sharding_streams.md.
//
// Thread safety: any thread; scopes belong to one.
class ShardingStreams {
 public:
  explicit ShardingStreams(c10::Device device);

  c10::Device device() const { return device_; }

  // While it lives the stream is the calling thread's current one.
  class Scope {
   public:
    explicit Scope(const std::optional<c10::Stream>& stream) {
      if (stream) guard_.emplace(*stream);
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    std::optional<c10::StreamGuard> guard_;
  };
  Scope for_gathers() const { return Scope(gathers_); }
  Scope for_sums() const { return Scope(sums_); }

  // None on the CPU.
  const std::optional<c10::Stream>& gathers() const { return gathers_; }

 private:
  const c10::Device device_;
  const std::optional<c10::Stream> gathers_;
  const std::optional<c10::Stream> sums_;
};

// A stream that the process has for such purposes. None on the CPU.
std::optional<c10::Stream> stream_beside_the_program(c10::Device device);

}  // namespace brigade

#endif  // BRIGADE_FSDP_STREAMS_H_
