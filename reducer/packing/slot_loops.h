// The loops over slots and elements that pack_loops.h's functions are made of,
// to be compiled for one kind of processor or another.

#ifndef BRIGADE_REDUCER_PACKING_SLOT_LOOPS_H_
#define BRIGADE_REDUCER_PACKING_SLOT_LOOPS_H_

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

#include "brigade/reducer/packing/packer.h"

namespace brigade {

// What products of gradients of type T are taken in.
template <typename T>
using Product = std::conditional_t<std::is_same_v<T, double>, double, float>;

// float64 becomes float16 or bfloat16 by way of float32, as in ATen.
template <typename To, typename From>
To cast(From value) {
  if constexpr (std::is_same_v<To, double> || std::is_same_v<To, float>) {
    return static_cast<To>(value);
  } else {
    return static_cast<To>(static_cast<float>(value));
  }
}

// to[k] = from[k] * factor. `from` may be `to`.
struct PlainTransfer {
  template <typename From, typename To>
  void operator()(const From* from, To* to, int64_t numel,
                  Product<From> factor) const {
    for (int64_t k = 0; k < numel; ++k) {
      to[k] = cast<To>(static_cast<Product<From>>(from[k]) * factor);
    }
  }
};

template <typename Gradient, typename Wire, typename Transfer>
void pack_slots(std::span<const SlotRange> slots, const void* const* gradients,
                void* flat, double scale, Transfer transfer) {
  const auto factor = static_cast<Product<Gradient>>(scale);
  for (size_t i = 0; i < slots.size(); ++i) {
    const auto [offset, numel] = slots[i];
    if (numel == 0) continue;  // perhaps of a buffer without memory
    const auto* from = static_cast<const Gradient*>(gradients[i]);
    Wire* to = static_cast<Wire*>(flat) + offset;
    if (from == nullptr) {
      std::memset(static_cast<void*>(to), 0, numel * sizeof(Wire));
    } else {
      transfer(from, to, numel, factor);
    }
  }
}

template <typename Gradient, typename Wire, typename Transfer>
void unpack_slots(std::span<const SlotRange> slots, const void* flat,
                  void* const* gradients, Transfer transfer) {
  for (size_t i = 0; i < slots.size(); ++i) {
    const auto [offset, numel] = slots[i];
    auto* to = static_cast<Gradient*>(gradients[i]);
    if (to == nullptr) continue;
    transfer(static_cast<const Wire*>(flat) + offset, to, numel,
             Product<Wire>{1});
  }
}

}  // namespace brigade

#endif  // BRIGADE_REDUCER_PACKING_SLOT_LOOPS_H_
