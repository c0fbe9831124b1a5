#include "brigade/tests/support/simulated_device/device_hooks.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "brigade/tests/support/simulated_device/device_allocator.h"
#include "brigade/tests/support/simulated_device/pinned_allocator.h"
#include "brigade/tests/support/simulated_device/simulation.h"

namespace brigade::simulated {
namespace {

c10::impl::VirtualGuardImpl guard() {
  return c10::impl::VirtualGuardImpl(kDeviceType);
}

}  // namespace

c10::DeviceIndex DeviceHooks::deviceCount() const {
  return guard().deviceCount();
}

c10::DeviceIndex DeviceHooks::getCurrentDevice() const {
  return guard().getDevice().index();
}

void DeviceHooks::setCurrentDevice(c10::DeviceIndex device) const {
  guard().setDevice({kDeviceType, device});
}

c10::DeviceIndex DeviceHooks::exchangeDevice(c10::DeviceIndex device) const {
  return guard().exchangeDevice({kDeviceType, device}).index();
}

c10::DeviceIndex DeviceHooks::maybeExchangeDevice(
    c10::DeviceIndex device) const {
  return exchangeDevice(device);
}

bool DeviceHooks::isPinnedPtr(const void* address) const {
  return is_pinned(address);
}

c10::Allocator* DeviceHooks::getPinnedMemoryAllocator() const {
  return &pinned_allocator();
}

c10::Device DeviceHooks::getDeviceFromPtr(void* address) const {
  const auto device = Simulation::get().memory().device_of(address);
  TORCH_CHECK(device, "simulated device: ", address,
              " is no device memory.\nMove the tensor there first.");
  return {kDeviceType, *device};
}

void DeviceHooks::resizePrivateUse1Bytes(const c10::Storage& storage,
                                         size_t bytes) const {
  resize_storage(*storage.unsafeGetStorageImpl(), bytes);
}

void resize_storage(c10::StorageImpl& storage, size_t bytes) {
  const c10::DeviceGuard on_device(storage.device());
  c10::DataPtr memory = bytes == 0 ? c10::DataPtr(nullptr, storage.device())
                                   : device_allocator().allocate(bytes);
  const size_t kept_bytes = std::min(bytes, storage.nbytes());
  if (kept_bytes > 0) {
    device_allocator().copy_data(memory.get(), storage.data(), kept_bytes);
  }
  storage.set_data_ptr_noswap(std::move(memory));
  storage.set_nbytes(bytes);
}

}  // namespace brigade::simulated
