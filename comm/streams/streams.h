// Streams of a device beside those that a program computes on, and how they
// wait for each other.

#ifndef BRIGADE_COMM_STREAMS_STREAMS_H_
#define BRIGADE_COMM_STREAMS_STREAMS_H_

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <vector>

namespace brigade {

// The calling thread's current stream. REQUIRES: a device with streams.
c10::Stream current_stream(c10::Device device);

// A stream of high priority from the process's pool: the little that runs there
// delays a collective. REQUIRES: a device with streams.
c10::Stream side_stream(c10::Device device);

// Makes the stream that packs a bucket wait for the streams that produced its
// gradients. Does nothing for devices without streams (CPU).
//
// Thread safety: none.
class StreamJoin {
 public:
  explicit StreamJoin(c10::Device device) : device_(device) {}

  // The calling thread's current stream has just produced a gradient.
  void gradient_produced();

  // Forgets the gradients produced so far.
  void forget() { producers_.clear(); }

  // The calling thread's current stream waits for all gradients produced since
  // the last join. Returns true if other streams had produced any.
  bool join();

 private:
  c10::Device device_;
  std::vector<c10::Stream> producers_;  // distinct
};

}  // namespace brigade

#endif  // BRIGADE_COMM_STREAMS_STREAMS_H_
