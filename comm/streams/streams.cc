#include "brigade/comm/streams/streams.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

namespace brigade {

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

c10::Stream side_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type())
      .getStreamFromGlobalPool(device, /*isHighPriority=*/true);
}

void StreamJoin::gradient_produced() {
  if (device_.is_cpu()) return;
  const c10::Stream stream = current_stream(device_);
  if (std::ranges::find(producers_, stream) == producers_.end()) {
    producers_.push_back(stream);
  }
}

bool StreamJoin::join() {
  if (device_.is_cpu()) return false;
  const c10::Stream packing = current_stream(device_);
  bool several = false;
  for (const c10::Stream& producer : producers_) {
    if (producer == packing) continue;
    // Pairs with the reads of pack() on the packing stream.
    c10::Event produced(device_.type());
    produced.record(producer);
    produced.block(packing);
    several = true;
  }
  producers_.clear();
  return several;
}

CommunicationStreams::~CommunicationStreams() {
  for (const InFlight& collective : in_flight_) collective.done.synchronize();
}

c10::Event CommunicationStreams::record_launch(c10::Device device) {
  c10::Event launch(device.type());
  launch.record(current_stream(device));
  return launch;
}

void CommunicationStreams::run(const c10::Event& launch,
                               std::vector<at::Tensor> tensors,
                               const std::function<void()>& body) {
  const c10::Device device = launch.device();
  std::unique_lock<std::mutex> lock(mutex_);
  auto known = streams_.find(device.index());
  if (known == streams_.end()) {
    known = streams_.emplace(device.index(), side_stream(device)).first;
  }
  const c10::Stream stream = known->second;
  lock.unlock();
  const c10::StreamGuard on_stream(stream);
  // Pairs with record_launch(): inputs are ready on the launcher's stream.
  launch.block(stream);
  body();
  c10::Event done(stream.device_type());
  done.record(stream);
  lock.lock();
  // A tensor belongs to the stream that it was allocated on, which does not
  // wait for this one: so the host keeps it until the device has finished.
  in_flight_.remove_if(
      [](const InFlight& collective) { return collective.done.query(); });
  in_flight_.push_back(
      {.done = std::move(done), .tensors = std::move(tensors)});
}

}  // namespace brigade
