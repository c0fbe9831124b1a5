// Memory of simulated devices and pinned memory of the host, given out as
// caching allocators do.
//
// Device memory is mapped twice: a tensor's address can't be read or written,
// so that host code that does so crashes as on a real device; kernels use the
// other mapping. A freed block goes back to the stream that it was allocated
// on, which may have it again at once, unless another stream's use of it was
// recorded. It goes to the next who asks for its size, as early as it may, so
// that an early free shows. New bytes are poison.
//
// Pinned memory that is freed while a copy still reads or writes it is held
// back until the host has waited for the copy.
//
// Thread safety: any thread.

#ifndef BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_MEMORY_H_
#define BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_MEMORY_H_

#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>

#include <cstddef>
#include <optional>

namespace brigade::simulated {

// Of the calling thread's current device and its current stream there.
c10::Allocator& device_allocator();
c10::Allocator& pinned_allocator();

// The address through which kernels read and write. Errors: RuntimeError if it
// is no memory of a device.
void* for_kernels(const void* address);

// Nothing: no memory of a device.
std::optional<c10::DeviceIndex> device_of(const void* address);

bool is_pinned(const void* address);

// Gives it other memory, with its elements as far as they fit.
void resize_storage(c10::StorageImpl& storage, size_t bytes);

}  // namespace brigade::simulated

#endif  // BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_MEMORY_H_
