// The streams that a root launches its collectives on: one for gathers and one
// for sums, so that neither waits for what a program computes beside it, nor
// for the other. On the CPU there are none.
//
// What is behind what: docs/sharding_streams.md.
//
// Thread safety: any thread; scopes belong to one.

#ifndef BRIGADE_FSDP_STREAMS_SHARDING_STREAMS_H_
#define BRIGADE_FSDP_STREAMS_SHARDING_STREAMS_H_

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <optional>

namespace brigade {

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

#endif  // BRIGADE_FSDP_STREAMS_SHARDING_STREAMS_H_
