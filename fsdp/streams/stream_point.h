// A moment in the work of some streams of one device: whatever waits for it is
// behind all that they had been given then. On the CPU there is none, and
// nobody waits.
//
// Thread safety: values, which share their events; nothing changes an event
// once it is recorded.

#ifndef BRIGADE_FSDP_STREAMS_STREAM_POINT_H_
#define BRIGADE_FSDP_STREAMS_STREAM_POINT_H_

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <memory>
#include <span>

namespace brigade {

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

}  // namespace brigade

#endif  // BRIGADE_FSDP_STREAMS_STREAM_POINT_H_
