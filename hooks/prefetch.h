// Asks for memory before it is used, so that it comes while other memory is
// worked on: what thousands of parameters consist of is more than a cache
// holds.
//
// Thread safety: pure.

#ifndef BRIGADE_HOOKS_PREFETCH_H_
#define BRIGADE_HOOKS_PREFETCH_H_

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <span>

namespace brigade {

inline constexpr size_t kCacheLineBytes = 64;

// All of an object that will be written to. It may be null.
template <typename T>
void prefetch(const T* object) {
  const char* const begin = reinterpret_cast<const char*>(object);
  for (size_t offset = 0; offset < sizeof(T); offset += kCacheLineBytes) {
    __builtin_prefetch(begin + offset, /*write=*/1);
  }
}

// For a pass over tensors that is at the i-th: those that follow, and a little
// later, when it is known where that is, what autograd knows of them.
inline void prefetch_after(std::span<const at::Tensor> tensors, size_t i) {
  constexpr size_t kAhead = 6;
  if (i + 2 * kAhead < tensors.size()) {
    prefetch(tensors[i + 2 * kAhead].unsafeGetTensorImpl());
  }
  if (i + kAhead < tensors.size()) {
    prefetch(static_cast<const torch::autograd::AutogradMeta*>(
        tensors[i + kAhead].unsafeGetTensorImpl()->autograd_meta()));
  }
}

}  // namespace brigade

#endif  // BRIGADE_HOOKS_PREFETCH_H_
