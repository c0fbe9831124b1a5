#include "brigade/comm/streams/streams.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

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

}  // namespace brigade
