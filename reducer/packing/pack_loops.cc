#include "brigade/reducer/packing/pack_loops.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "brigade/reducer/packing/packer_devices.h"

namespace brigade {
namespace {

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
                void* flat, double scale) {
  const auto factor = static_cast<Product<Gradient>>(scale);
  for (size_t i = 0; i < slots.size(); ++i) {
    const auto [offset, numel] = slots[i];
    if (numel == 0) continue;  // perhaps of a buffer without memory
    const auto* from = static_cast<const Gradient*>(gradients[i]);
    Wire* to = static_cast<Wire*>(flat) + offset;
    if (from == nullptr) {
      std::memset(static_cast<void*>(to), 0, numel * sizeof(Wire));
    } else {
      Transfer()(from, to, numel, factor);
    }
  }
}

template <typename Gradient, typename Wire, typename Transfer>
void unpack_slots(std::span<const SlotRange> slots, const void* flat,
                  void* const* gradients) {
  for (size_t i = 0; i < slots.size(); ++i) {
    const auto [offset, numel] = slots[i];
    auto* to = static_cast<Gradient*>(gradients[i]);
    if (to == nullptr) continue;
    Transfer()(static_cast<const Wire*>(flat) + offset, to, numel,
               Product<Wire>{1});
  }
}

template <typename Transfer>
PackLoops loops_by(at::ScalarType gradient, at::ScalarType wire) {
  return visit_pair(gradient, wire, []<typename Gradient, typename Wire>() {
    return PackLoops{.pack = pack_slots<Gradient, Wire, Transfer>,
                     .unpack = unpack_slots<Gradient, Wire, Transfer>};
  });
}

#ifdef __x86_64__

// Only functions so marked use these instructions, so the library runs on
// any x86-64 processor; native_pack_loops() asks which one it is. Their
// callees are compiled into them. target_clones would compile one text for
// both, but intrinsics have no version for other processors: of 65,536 elements
// it takes 9 to 25 times as long with float16, 2.1 to 2.4 times with bfloat16,
// and 0.93 times from float32 to float32.
#define BRIGADE_AVX2 __attribute__((target("avx2,f16c"), flatten))

using at::Half;

constexpr int64_t kLanes = 8;  // of float32

// Compilers do not find these instructions for c10's conversions of float16.

BRIGADE_AVX2 inline void convert(const Half* from, float* to, int64_t numel) {
  int64_t k = 0;
  for (; k + kLanes <= numel; k += kLanes) {
    const auto* bits = reinterpret_cast<const __m128i*>(from + k);
    _mm256_storeu_ps(to + k, _mm256_cvtph_ps(_mm_loadu_si128(bits)));
  }
  for (; k < numel; ++k) to[k] = _cvtsh_ss(from[k].x);
}

BRIGADE_AVX2 inline void convert(const float* from, Half* to, int64_t numel) {
  int64_t k = 0;
  for (; k + kLanes <= numel; k += kLanes) {
    _mm_storeu_si128(
        reinterpret_cast<__m128i*>(to + k),
        _mm256_cvtps_ph(_mm256_loadu_ps(from + k), _MM_FROUND_TO_NEAREST_INT));
  }
  for (; k < numel; ++k) {
    to[k].x = _cvtss_sh(from[k], _MM_FROUND_TO_NEAREST_INT);
  }
}

// Stays in the cache.
using Block = std::array<float, 1024>;

template <typename From>
BRIGADE_AVX2 inline const auto* readable(const From* from, Block& block,
                                         int64_t numel) {
  if constexpr (std::is_same_v<From, Half>) {
    convert(from, block.data(), numel);
    return const_cast<const float*>(block.data());
  } else {
    return from;
  }
}

// float16 goes through blocks of float32.
struct Avx2Transfer {
  template <typename From, typename To>
  BRIGADE_AVX2 void operator()(const From* from, To* to, int64_t numel,
                               Product<From> factor) const {
    constexpr PlainTransfer kPlain;
    if constexpr (!std::is_same_v<From, Half> && !std::is_same_v<To, Half>) {
      kPlain(from, to, numel, factor);
    } else {
      Block block;
      for (int64_t k = 0; k < numel; k += block.size()) {
        const int64_t size = std::min<int64_t>(numel - k, block.size());
        const auto* source = readable(from + k, block, size);
        if constexpr (std::is_same_v<To, Half>) {
          kPlain(source, block.data(), size, factor);
          convert(block.data(), to + k, size);
        } else {
          kPlain(source, to + k, size, factor);
        }
      }
    }
  }
};

#endif  // __x86_64__

}  // namespace

PackLoops portable_pack_loops(at::ScalarType gradient, at::ScalarType wire) {
  return loops_by<PlainTransfer>(gradient, wire);
}

PackLoops native_pack_loops(at::ScalarType gradient, at::ScalarType wire) {
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
    return loops_by<Avx2Transfer>(gradient, wire);
  }
#endif
  return {};
}

}  // namespace brigade
