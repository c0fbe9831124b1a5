// The stream that a group of this process runs its collectives on, one for each
// device that has streams: as the backends of accelerators do, beside the
// streams of whoever launches them.
//
// Thread safety: any thread.

#ifndef BRIGADE_COMM_STREAMS_COMMUNICATION_STREAMS_H_
#define BRIGADE_COMM_STREAMS_COMMUNICATION_STREAMS_H_

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

class CommunicationStreams {
 public:
  CommunicationStreams() = default;
  // Waits until the devices have done what they were given.
  ~CommunicationStreams();
  CommunicationStreams(const CommunicationStreams&) = delete;
  CommunicationStreams& operator=(const CommunicationStreams&) = delete;

  // What lies behind the launch of a collective: all that the calling thread's
  // current stream of `device` has been given. REQUIRES: a device with streams.
  static c10::Event record_launch(c10::Device device);

  // Calls `body` with the stream of the event's device current, which waits for
  // `launch` first. Keeps `tensors` until the device is through with them.
  void run(const c10::Event& launch, std::vector<at::Tensor> tensors,
           const std::function<void()>& body);

 private:
  struct InFlight {
    c10::Event done;
    std::vector<at::Tensor> tensors;
  };

  c10::Stream stream_of(c10::Device device);
  void keep(c10::Event done, std::vector<at::Tensor> tensors);

  std::mutex mutex_;
  // Guarded by mutex_.
  std::map<c10::DeviceIndex, c10::Stream> streams_;
  std::list<InFlight> in_flight_;
};

}  // namespace brigade

#endif  // BRIGADE_COMM_STREAMS_COMMUNICATION_STREAMS_H_
