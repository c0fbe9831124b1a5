#include "brigade/tests/support/simulated_device/device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceType.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <chrono>
#include <map>
#include <utility>

#include "brigade/tests/support/simulated_device/memory.h"
#include "brigade/tests/support/simulated_device/operators.h"
#include "brigade/tests/support/simulated_device/ordering_calls.h"
#include "brigade/tests/support/simulated_device/simulation.h"

namespace brigade::simulated {
namespace {

// CUDA's pool size; later requests get the first streams again.
constexpr c10::StreamId kPoolSize = 32;

thread_local c10::DeviceIndex current_device = 0;
thread_local std::map<c10::DeviceIndex, c10::StreamId> current_streams;

// Stream 0 is the default stream; the pool's follow.
std::atomic<c10::StreamId> pool_streams_given = 0;
std::atomic<c10::StreamId> next_stream = kPoolSize + 1;

c10::Device with_index(c10::Device device) {
  return device.has_index() ? device : c10::Device(kDeviceType, current_device);
}

c10::Stream stream_of(c10::Device device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, with_index(device), id);
}

Event* event_at(void* event) { return static_cast<Event*>(event); }

class DeviceGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kDeviceType; }

  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    uncheckedSetDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return c10::Device(kDeviceType, current_device);
  }
  void setDevice(c10::Device device) const override {
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(Simulation::get().num_devices());
  }

  c10::Stream getStream(c10::Device device) const override {
    return current_stream(device);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, with_index(device));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return stream_of(device, 1 + pool_streams_given++ % kPoolSize);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream_of(device, next_stream++);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = current_stream(stream.device());
    if (!is_dropped({.kind = OrderingCall::kSwitch,
                     .stream = stream,
                     .other = before})) {
      current_streams[stream.device_index()] = stream.id();
    }
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    return Simulation::get().host_has_waited(stream);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Simulation::get().host_waits(stream);
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    Simulation::get().host_waits(device);
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex,
              c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Event{.recorded_on = stream, .moment = {}, .time = {}};
    }
    Simulation::get().record(*event_at(*event), stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) Simulation::get().wait(stream, *event_at(event));
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || Simulation::get().query(*event_at(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) Simulation::get().host_waits(*event_at(event));
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete event_at(event);
  }
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(event_at(to)->time -
                                                     event_at(from)->time)
        .count();
  }

  void recordDataPtrOnStream(const c10::DataPtr& memory,
                             const c10::Stream& stream) const override {
    Simulation::get().record_use(memory.get(), stream);
  }
};

// The rest of LibTorch's interface of an accelerator.
class DeviceHooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(Simulation::get().num_devices());
  }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    exchangeDevice(device);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current_device : std::exchange(current_device, device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static const at::Generator generator =
        at::make_generator<at::CPUGeneratorImpl>();
    return generator;
  }
  bool isPinnedPtr(const void* address) const override {
    return is_pinned(address);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator();
  }
  c10::Device getDeviceFromPtr(void* address) const override {
    const auto device = device_of(address);
    TORCH_CHECK(device, "simulated device: ", address,
                " is not device memory.\nMove the tensor there first.");
    return {kDeviceType, *device};
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage,
                              size_t bytes) const override {
    resize_storage(*storage.unsafeGetStorageImpl(), bytes);
  }
};

}  // namespace

c10::Stream current_stream(c10::Device device) {
  return stream_of(device, current_streams[with_index(device).index()]);
}

void install(int num_devices) {
  Simulation::start(num_devices);
  // The process's accelerator must have a registered name.
  c10::register_privateuse1_backend("sim");
  c10::impl::registerDeviceGuard(kDeviceType, new DeviceGuard);
  c10::SetAllocator(kDeviceType, &device_allocator());
  at::RegisterPrivateUse1HooksInterface(new DeviceHooks);
  register_operators();
}

}  // namespace brigade::simulated
