#include <cstring>
#include <type_traits>

#include "brigade/engine/pack_loops.h"

namespace brigade {
namespace {

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

template <typename Gradient, typename Wire>
void pack(std::span<const SlotRange> slots, const void* const* gradients,
          void* flat, double scale) {
  const auto factor = static_cast<Product<Gradient>>(scale);
  for (size_t i = 0; i < slots.size(); ++i) {
    const auto [offset, numel] = slots[i];
    if (numel == 0) continue;  // perhaps of a buffer without memory
    const auto* from = static_cast<const Gradient*>(gradients[i]);
    Wire* to = static_cast<Wire*>(flat) + offset;
    if (from == nullptr) {
      std::memset(static_cast<void*>(to), 0, numel * sizeof(Wire));
      continue;
    }
    for (int64_t k = 0; k < numel; ++k) {
      to[k] = cast<Wire>(static_cast<Product<Gradient>>(from[k]) * factor);
    }
  }
}

template <typename Gradient, typename Wire>
void unpack(std::span<const SlotRange> slots, const void* flat,
            void* const* gradients) {
  using Common =
      std::conditional_t<std::is_same_v<Wire, double>, double, float>;
  for (size_t i = 0; i < slots.size(); ++i) {
    const auto [offset, numel] = slots[i];
    const Wire* from = static_cast<const Wire*>(flat) + offset;
    auto* to = static_cast<Gradient*>(gradients[i]);
    if (to == nullptr) continue;
    for (int64_t k = 0; k < numel; ++k) {
      to[k] = cast<Gradient>(static_cast<Common>(from[k]));
    }
  }
}

}  // namespace

PackLoops portable_pack_loops(at::ScalarType gradient, at::ScalarType wire) {
  return visit_pair(gradient, wire, []<typename Gradient, typename Wire>() {
    return PackLoops{.pack = pack<Gradient, Wire>,
                     .unpack = unpack<Gradient, Wire>};
  });
}

}  // namespace brigade
