#include "brigade/tests/support/simulated_device/device_guard.h"

#include <atomic>
#include <chrono>
#include <map>
#include <utility>

#include "brigade/tests/support/simulated_device/ordering_calls.h"
#include "brigade/tests/support/simulated_device/simulation.h"

namespace brigade::simulated {
namespace {

// As many as CUDA's: whoever asks for more gets the first ones again.
constexpr c10::StreamId kPoolSize = 32;

thread_local c10::DeviceIndex current_device = 0;
thread_local std::map<c10::DeviceIndex, c10::StreamId> current_streams;

// 0 is the default stream, the pool's come next.
std::atomic<c10::StreamId> pool_streams_given = 0;
std::atomic<c10::StreamId> next_stream = kPoolSize + 1;

c10::Device with_index(c10::Device device) {
  return device.has_index() ? device : c10::Device(kDeviceType, current_device);
}

Event* event_at(void* event) { return static_cast<Event*>(event); }

}  // namespace

c10::Stream current_stream(c10::Device device) {
  device = with_index(device);
  return c10::Stream(c10::Stream::UNSAFE, device,
                     current_streams[device.index()]);
}

c10::DeviceType DeviceGuard::type() const { return kDeviceType; }

c10::Device DeviceGuard::exchangeDevice(c10::Device device) const {
  const c10::Device before = getDevice();
  uncheckedSetDevice(device);
  return before;
}

c10::Device DeviceGuard::getDevice() const {
  return c10::Device(kDeviceType, current_device);
}

void DeviceGuard::setDevice(c10::Device device) const {
  uncheckedSetDevice(device);
}

void DeviceGuard::uncheckedSetDevice(c10::Device device) const noexcept {
  if (device.has_index()) current_device = device.index();
}

c10::DeviceIndex DeviceGuard::deviceCount() const noexcept {
  return static_cast<c10::DeviceIndex>(Simulation::get().num_devices());
}

c10::Stream DeviceGuard::getStream(c10::Device device) const {
  return current_stream(device);
}

c10::Stream DeviceGuard::getDefaultStream(c10::Device device) const {
  return c10::Stream(c10::Stream::DEFAULT, with_index(device));
}

c10::Stream DeviceGuard::getStreamFromGlobalPool(c10::Device device,
                                                 bool) const {
  return c10::Stream(c10::Stream::UNSAFE, with_index(device),
                     1 + pool_streams_given++ % kPoolSize);
}

c10::Stream DeviceGuard::getNewStream(c10::Device device, int) const {
  return c10::Stream(c10::Stream::UNSAFE, with_index(device), next_stream++);
}

c10::Stream DeviceGuard::exchangeStream(c10::Stream stream) const {
  const c10::Stream before = current_stream(stream.device());
  if (is_dropped(
          {.kind = OrderingCall::kSwitch, .stream = stream, .other = before})) {
    return before;
  }
  current_streams[stream.device_index()] = stream.id();
  return before;
}

bool DeviceGuard::queryStream(const c10::Stream& stream) const {
  return Simulation::get().host_has_waited(stream);
}

void DeviceGuard::synchronizeStream(const c10::Stream& stream) const {
  Simulation::get().host_waits(stream);
}

void DeviceGuard::synchronizeDevice(c10::DeviceIndex device) const {
  Simulation::get().host_waits(device);
}

void DeviceGuard::record(void** event, const c10::Stream& stream,
                         c10::DeviceIndex, c10::EventFlag) const {
  if (*event == nullptr) {
    *event = new Event{.recorded_on = stream, .moment = {}, .time = {}};
  }
  Simulation::get().record(*event_at(*event), stream);
}

void DeviceGuard::block(void* event, const c10::Stream& stream) const {
  if (event != nullptr) Simulation::get().wait(stream, *event_at(event));
}

bool DeviceGuard::queryEvent(void* event) const {
  return event == nullptr || Simulation::get().query(*event_at(event));
}

void DeviceGuard::synchronizeEvent(void* event) const {
  if (event != nullptr) Simulation::get().host_waits(*event_at(event));
}

void DeviceGuard::destroyEvent(void* event, c10::DeviceIndex) const noexcept {
  delete event_at(event);
}

double DeviceGuard::elapsedTime(void* from, void* to, c10::DeviceIndex) const {
  return std::chrono::duration<double, std::milli>(event_at(to)->time -
                                                   event_at(from)->time)
      .count();
}

void DeviceGuard::recordDataPtrOnStream(const c10::DataPtr& memory,
                                        const c10::Stream& stream) const {
  Simulation::get().record_use(memory.get(), stream);
}

}  // namespace brigade::simulated
