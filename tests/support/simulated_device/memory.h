// Caching allocators for simulated device memory and pinned host memory.
//
// Device memory is mapped twice. A tensor's address can't be read or written,
// so host code that does so crashes as on a real device; kernels use the other
// mapping. A freed block returns to the stream that it was allocated on, at
// once unless another stream's use was recorded. It is reused as early as
// possible, for the next request of its size, so that an early free is
// detected. New bytes are poison.
//
// Pinned memory that is freed while a copy uses it is reused only after the
// host has waited for the copy.
//
// Thread safety: any thread.

#ifndef BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_MEMORY_H_
#define BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_MEMORY_H_

#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>

#include <cstddef>
#include <optional>

namespace brigade::simulated {

// Allocates on the calling thread's current device and stream.
c10::Allocator& device_allocator();
c10::Allocator& pinned_allocator();

// Returns the address that kernels use. Errors: RuntimeError if `address` is
// not device memory.
void* for_kernels(const void* address);

// Returns nullopt if `address` is not device memory.
std::optional<c10::DeviceIndex> device_of(const void* address);

bool is_pinned(const void* address);

// Reallocates the storage and copies its bytes as far as they fit.
void resize_storage(c10::StorageImpl& storage, size_t bytes);

}  // namespace brigade::simulated

#endif  // BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_MEMORY_H_
