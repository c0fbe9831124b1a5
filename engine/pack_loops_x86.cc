#include <immintrin.h>

#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "brigade/engine/pack_loops.h"

// Only the functions so marked use these instructions, so the library runs on
// any x86-64 processor; native_pack_loops() asks which one it is.
#define BRIGADE_AVX2 __attribute__((target("avx2,f16c")))
#define BRIGADE_AVX2_INLINE \
  inline __attribute__((target("avx2,f16c"), always_inline))

namespace brigade {
namespace {

using at::BFloat16;
using at::Half;

// Eight lanes of float32.

BRIGADE_AVX2_INLINE __m256i upper_halves(__m128i bits) {
  return _mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16);
}

// bfloat16 is a float32's upper half: round to nearest even by adding 0x7fff,
// or 0x8000 if the result would be odd, before the lower half is cut off.
BRIGADE_AVX2_INLINE __m128i to_bfloat16_bits(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i is_odd =
      _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(
      _mm256_add_epi32(bits,
                       _mm256_add_epi32(is_odd, _mm256_set1_epi32(0x7fff))),
      16);
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i result =
      _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), is_nan);
  return _mm_packus_epi32(_mm256_castsi256_si128(result),
                          _mm256_extracti128_si256(result, 1));
}

BRIGADE_AVX2_INLINE __m256 load(const float* from, float) {
  return _mm256_loadu_ps(from);
}
BRIGADE_AVX2_INLINE __m256 load(const Half* from, float) {
  return _mm256_cvtph_ps(
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
BRIGADE_AVX2_INLINE __m256 load(const BFloat16* from, float) {
  return _mm256_castsi256_ps(
      upper_halves(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}

BRIGADE_AVX2_INLINE void store(float* to, __m256 x) { _mm256_storeu_ps(to, x); }
BRIGADE_AVX2_INLINE void store(Half* to, __m256 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
BRIGADE_AVX2_INLINE void store(BFloat16* to, __m256 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), to_bfloat16_bits(x));
}

BRIGADE_AVX2_INLINE __m256 multiply(__m256 a, __m256 b) {
  return _mm256_mul_ps(a, b);
}
BRIGADE_AVX2_INLINE __m256 all_lanes(float x) { return _mm256_set1_ps(x); }

// Four lanes of float64.  float16 and bfloat16 are reached by way of float32,
// as in ATen.

BRIGADE_AVX2_INLINE __m256d load(const double* from, double) {
  return _mm256_loadu_pd(from);
}
BRIGADE_AVX2_INLINE __m256d load(const float* from, double) {
  return _mm256_cvtps_pd(_mm_loadu_ps(from));
}
BRIGADE_AVX2_INLINE __m256d load(const Half* from, double) {
  return _mm256_cvtps_pd(
      _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}
BRIGADE_AVX2_INLINE __m256d load(const BFloat16* from, double) {
  const __m128i bits = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return _mm256_cvtps_pd(
      _mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(bits), 16)));
}

BRIGADE_AVX2_INLINE void store(double* to, __m256d x) {
  _mm256_storeu_pd(to, x);
}
BRIGADE_AVX2_INLINE void store(float* to, __m256d x) {
  _mm_storeu_ps(to, _mm256_cvtpd_ps(x));
}
BRIGADE_AVX2_INLINE void store(Half* to, __m256d x) {
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to),
                   _mm_cvtps_ph(_mm256_cvtpd_ps(x), _MM_FROUND_TO_NEAREST_INT));
}
BRIGADE_AVX2_INLINE void store(BFloat16* to, __m256d x) {
  _mm_storel_epi64(
      reinterpret_cast<__m128i*>(to),
      to_bfloat16_bits(_mm256_castps128_ps256(_mm256_cvtpd_ps(x))));
}

BRIGADE_AVX2_INLINE __m256d multiply(__m256d a, __m256d b) {
  return _mm256_mul_pd(a, b);
}
BRIGADE_AVX2_INLINE __m256d all_lanes(double x) { return _mm256_set1_pd(x); }

// One element, in the same way.

BRIGADE_AVX2_INLINE float load_one(float x) { return x; }
BRIGADE_AVX2_INLINE double load_one(double x) { return x; }
BRIGADE_AVX2_INLINE float load_one(Half x) { return _cvtsh_ss(x.x); }
BRIGADE_AVX2_INLINE float load_one(BFloat16 x) {
  return std::bit_cast<float>(uint32_t{x.x} << 16);
}

template <typename Lane>
BRIGADE_AVX2_INLINE void store_one(float* to, Lane x) {
  *to = static_cast<float>(x);
}
BRIGADE_AVX2_INLINE void store_one(double* to, double x) { *to = x; }
template <typename Lane>
BRIGADE_AVX2_INLINE void store_one(Half* to, Lane x) {
  to->x = _cvtss_sh(static_cast<float>(x), _MM_FROUND_TO_NEAREST_INT);
}
template <typename Lane>
BRIGADE_AVX2_INLINE void store_one(BFloat16* to, Lane x) {
  const __m256 lanes =
      _mm256_castps128_ps256(_mm_set_ss(static_cast<float>(x)));
  to->x = static_cast<uint16_t>(_mm_cvtsi128_si32(to_bfloat16_bits(lanes)));
}

// to[k] = cast(from[k] * factor), in Lane's precision.  `from` may be `to`.
template <typename To, typename From, typename Lane>
BRIGADE_AVX2_INLINE void transfer(const From* from, To* to, int64_t numel,
                                  Lane factor) {
  constexpr int64_t kLanes = 32 / sizeof(Lane);
  const auto factors = all_lanes(factor);
  int64_t k = 0;
  for (; k + 4 * kLanes <= numel; k += 4 * kLanes) {
    const auto a = load(from + k, factor);
    const auto b = load(from + k + kLanes, factor);
    const auto c = load(from + k + 2 * kLanes, factor);
    const auto d = load(from + k + 3 * kLanes, factor);
    store(to + k, multiply(a, factors));
    store(to + k + kLanes, multiply(b, factors));
    store(to + k + 2 * kLanes, multiply(c, factors));
    store(to + k + 3 * kLanes, multiply(d, factors));
  }
  for (; k + kLanes <= numel; k += kLanes) {
    store(to + k, multiply(load(from + k, factor), factors));
  }
  for (; k < numel; ++k) {
    store_one(to + k, static_cast<Lane>(load_one(from[k])) * factor);
  }
}

template <typename Gradient, typename Wire>
BRIGADE_AVX2 void pack(std::span<const SlotRange> slots,
                       const void* const* gradients, void* flat, double scale) {
  using Lane =
      std::conditional_t<std::is_same_v<Gradient, double>, double, float>;
  const Lane factor = static_cast<Lane>(scale);
  for (size_t i = 0; i < slots.size(); ++i) {
    if (slots[i].numel == 0) continue;  // perhaps of a buffer without memory
    const auto* from = static_cast<const Gradient*>(gradients[i]);
    Wire* to = static_cast<Wire*>(flat) + slots[i].offset_numel;
    if (from == nullptr) {
      std::memset(static_cast<void*>(to), 0, slots[i].numel * sizeof(Wire));
    } else {
      transfer(from, to, slots[i].numel, factor);
    }
  }
}

template <typename Gradient, typename Wire>
BRIGADE_AVX2 void unpack(std::span<const SlotRange> slots, const void* flat,
                         void* const* gradients) {
  constexpr bool kIsDouble =
      std::is_same_v<Gradient, double> || std::is_same_v<Wire, double>;
  using Lane = std::conditional_t<kIsDouble, double, float>;
  for (size_t i = 0; i < slots.size(); ++i) {
    const Wire* from = static_cast<const Wire*>(flat) + slots[i].offset_numel;
    auto* to = static_cast<Gradient*>(gradients[i]);
    if (to != nullptr) transfer(from, to, slots[i].numel, Lane{1});
  }
}

}  // namespace

PackLoops native_pack_loops(at::ScalarType gradient, at::ScalarType wire) {
  const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  if (!has_avx2) return {};
  return visit_pair(gradient, wire, []<typename Gradient, typename Wire>() {
    return PackLoops{.pack = pack<Gradient, Wire>,
                     .unpack = unpack<Gradient, Wire>};
  });
}

}  // namespace brigade
