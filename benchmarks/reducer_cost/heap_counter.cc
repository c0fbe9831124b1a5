#include "brigade/benchmarks/reducer_cost/heap_counter.h"

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace brigade::benchmarks {
namespace {

std::atomic<int64_t> num_allocations = 0;

void* counted(void* memory) {
  num_allocations.fetch_add(1, std::memory_order_relaxed);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

int64_t heap_allocations() { return num_allocations; }

}  // namespace brigade::benchmarks

// The program's own, in place of the library's: LibTorch calls them too.
void* operator new(size_t num_bytes) {
  return brigade::benchmarks::counted(std::malloc(num_bytes));
}
void* operator new(size_t num_bytes, std::align_val_t alignment) {
  const auto align = static_cast<size_t>(alignment);
  return brigade::benchmarks::counted(
      std::aligned_alloc(align, (num_bytes + align - 1) / align * align));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept {
  std::free(memory);
}
void operator delete(void* memory, size_t, std::align_val_t) noexcept {
  std::free(memory);
}
