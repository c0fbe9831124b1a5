#include "brigade/comm/streams/communication_streams.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "brigade/comm/streams/side_stream.h"

namespace brigade {

CommunicationStreams::~CommunicationStreams() {
  for (const InFlight& collective : in_flight_) collective.done.synchronize();
}

c10::Event CommunicationStreams::record_launch(c10::Device device) {
  c10::Event launch(device.type());
  launch.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  return launch;
}

void CommunicationStreams::run(const c10::Event& launch,
                               std::vector<at::Tensor> tensors,
                               const std::function<void()>& body) {
  const c10::Stream stream = stream_of(launch.device());
  const c10::StreamGuard on_stream(stream);
  // Pairs with record_launch(): inputs are ready on the launcher's stream.
  launch.block(stream);
  body();
  c10::Event done(stream.device_type());
  done.record(stream);
  keep(std::move(done), std::move(tensors));
}

c10::Stream CommunicationStreams::stream_of(c10::Device device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto known = streams_.find(device.index());
  if (known != streams_.end()) return known->second;
  const c10::Stream stream = side_stream(device);
  streams_.emplace(device.index(), stream);
  return stream;
}

// Dropped by the host only once it knows that they are done: a tensor belongs
// to the stream that it was allocated on, which does not wait for this one.
void CommunicationStreams::keep(c10::Event done,
                                std::vector<at::Tensor> tensors) {
  const std::lock_guard<std::mutex> lock(mutex_);
  in_flight_.remove_if(
      [](const InFlight& collective) { return collective.done.query(); });
  in_flight_.push_back(
      {.done = std::move(done), .tensors = std::move(tensors)});
}

}  // namespace brigade
