// The memory of simulated devices. It is mapped twice: a tensor's address
// can't be read or written, so that code of the host that does so crashes where
// it would on a real device; kernels use the other mapping.
//
// Thread safety: any thread.

#ifndef BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_DEVICE_MEMORY_H_
#define BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_DEVICE_MEMORY_H_

#include <c10/core/Device.h>

#include <cstddef>
#include <mutex>
#include <optional>
#include <vector>

namespace brigade::simulated {

class DeviceMemory {
 public:
  // Errors: RuntimeError if the system refuses the memory.
  explicit DeviceMemory(int num_devices);

  // Memory that nobody has had so far, and that is never given back. Errors:
  // RuntimeError if a device has no more.
  void* reserve(c10::DeviceIndex device, size_t bytes);

  // What a kernel reads and writes. Errors: RuntimeError if it is no memory of
  // a device.
  void* for_kernels(const void* address) const;

  // Nothing: no memory of a device.
  std::optional<c10::DeviceIndex> device_of(const void* address) const;

 private:
  struct Device {
    char* addresses;  // of tensors; nobody may read or write there
    char* memory;     // the same, for kernels
    size_t used_bytes;
  };

  std::vector<Device> devices_;  // their addresses are constant
  std::mutex mutex_;             // guards what is used
};

}  // namespace brigade::simulated

#endif  // BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_DEVICE_MEMORY_H_
