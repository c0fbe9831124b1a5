// What LibTorch's generic code asks an accelerator, beside streams and memory.
//
// Thread safety: any thread.

#ifndef BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_DEVICE_HOOKS_H_
#define BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_DEVICE_HOOKS_H_

#include <ATen/detail/PrivateUse1HooksInterface.h>

#include <cstddef>

namespace brigade::simulated {

class DeviceHooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override;
  c10::DeviceIndex getCurrentDevice() const override;
  void setCurrentDevice(c10::DeviceIndex device) const override;
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override;
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override;
  bool isPinnedPtr(const void* address) const override;
  c10::Allocator* getPinnedMemoryAllocator() const override;
  c10::Device getDeviceFromPtr(void* address) const override;
  void resizePrivateUse1Bytes(const c10::Storage& storage,
                              size_t bytes) const override;
};

// Gives it other memory, with its elements as far as they fit.
void resize_storage(c10::StorageImpl& storage, size_t bytes);

}  // namespace brigade::simulated

#endif  // BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_DEVICE_HOOKS_H_
