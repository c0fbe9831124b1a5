#include "brigade/tests/support/simulated_device/device_memory.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

namespace brigade::simulated {
namespace {

// Of one device. The system gives a page when it is first written to.
constexpr size_t kDeviceBytes = size_t{1} << 30;

char* map(int file, int protection) {
  void* const address =
      mmap(nullptr, kDeviceBytes, protection, MAP_SHARED, file, 0);
  TORCH_CHECK(address != MAP_FAILED,
              "simulated device: can't map its memory of ", kDeviceBytes,
              " bytes.\nRun fewer tests at once.");
  return static_cast<char*>(address);
}

}  // namespace

DeviceMemory::DeviceMemory(int num_devices) {
  for (int d = 0; d < num_devices; ++d) {
    const int file = memfd_create("simulated_device", 0);
    TORCH_CHECK(file >= 0 && ftruncate(file, kDeviceBytes) == 0,
                "simulated device: can't make a file of ", kDeviceBytes,
                " bytes in memory.\nRun fewer tests at once.");
    devices_.push_back({.addresses = map(file, PROT_NONE),
                        .memory = map(file, PROT_READ | PROT_WRITE),
                        .used_bytes = 0});
    close(file);
  }
}

void* DeviceMemory::reserve(c10::DeviceIndex device, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Device& from = devices_.at(device);
  TORCH_CHECK(from.used_bytes + bytes <= kDeviceBytes, "simulated device ",
              static_cast<int>(device), ": asked for ", bytes, " bytes, ",
              kDeviceBytes - from.used_bytes,
              " are left.\nUse smaller tensors.");
  char* const address = from.addresses + from.used_bytes;
  from.used_bytes += bytes;
  return address;
}

void* DeviceMemory::for_kernels(const void* address) const {
  const std::optional<c10::DeviceIndex> device = device_of(address);
  TORCH_CHECK(device, "simulated device: a kernel was given ", address,
              ", which is no device memory.\nMove the tensor there first.");
  const Device& from = devices_[*device];
  return from.memory + (static_cast<const char*>(address) - from.addresses);
}

std::optional<c10::DeviceIndex> DeviceMemory::device_of(
    const void* address) const {
  for (size_t d = 0; d < devices_.size(); ++d) {
    const char* const begin = devices_[d].addresses;
    if (begin <= address && address < begin + kDeviceBytes) {
      return static_cast<c10::DeviceIndex>(d);
    }
  }
  return std::nullopt;
}

}  // namespace brigade::simulated
