// Streams of a device beside those that a program computes on, and how they
// wait for each other.

#ifndef BRIGADE_COMM_STREAMS_STREAMS_H_
#define BRIGADE_COMM_STREAMS_STREAMS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <functional>
#include <list>
#include <map>
#include <mutex>
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

// The streams that run collectives of a group of this process, one per device:
// as accelerators' backends have them.
//
// Thread safety: any thread.
class CommunicationStreams {
 public:
  CommunicationStreams() = default;
  // Waits until the devices have finished.
  ~CommunicationStreams();
  CommunicationStreams(const CommunicationStreams&) = delete;
  CommunicationStreams& operator=(const CommunicationStreams&) = delete;

  // Records the calling thread's current stream of `device`, at the launch of a
  // collective. REQUIRES: a device with streams.
  static c10::Event record_launch(c10::Device device);

  // Calls `body` with the stream of the event's device current, which waits for
  // `launch` first. Keeps `tensors` until the device has finished with them.
  void run(const c10::Event& launch, std::vector<at::Tensor> tensors,
           const std::function<void()>& body);

 private:
  struct InFlight {
    c10::Event done;
    std::vector<at::Tensor> tensors;
  };

  std::mutex mutex_;
  // Guarded by mutex_.
  std::map<c10::DeviceIndex, c10::Stream> streams_;
  std::list<InFlight> in_flight_;
};

}  // namespace brigade

#endif  // BRIGADE_COMM_STREAMS_STREAMS_H_
