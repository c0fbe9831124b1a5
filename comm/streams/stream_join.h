// Makes one stream wait for gradients that others produced.
//
// The gradients of a bucket may be accumulated on several streams of its
// device, while one stream packs them all. For devices without streams (CPU)
// nothing here does anything.
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_COMM_STREAMS_STREAM_JOIN_H_
#define BRIGADE_COMM_STREAMS_STREAM_JOIN_H_

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <vector>

namespace brigade {

// The calling thread's. REQUIRES: a device with streams.
c10::Stream current_stream(c10::Device device);

class StreamJoin {
 public:
  explicit StreamJoin(c10::Device device) : device_(device) {}

  // The calling thread's current stream has just produced a gradient.
  void gradient_produced();

  // Whatever has been produced so far is not waited for.
  void forget() { producers_.clear(); }

  // The calling thread's current stream waits for all gradients produced since
  // the last join. Returns true if other streams had produced any.
  bool join();

 private:
  c10::Device device_;
  std::vector<c10::Stream> producers_;  // distinct
};

}  // namespace brigade

#endif  // BRIGADE_COMM_STREAMS_STREAM_JOIN_H_
