// Packer: copies gradients into a flat bucket buffer and back, in one pass that
// also scales and casts.
//
// The second half of this file is for implementations of Packer.

#ifndef BRIGADE_REDUCER_PACKING_PACKER_H_
#define BRIGADE_REDUCER_PACKING_PACKER_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/macros/Macros.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <type_traits>
#include <vector>

namespace brigade {

// The slot of one gradient in a flat bucket buffer, in elements.
struct SlotRange {
  int64_t offset_numel = 0;
  int64_t numel = 0;  // may be 0
};

// Wire dtypes (the dtypes of `flat`):
//
//   gradient dtype               wire dtype
//   float32, float16, bfloat16   float32, float16, bfloat16
//   float64                      float64, float32, float16, bfloat16
//   complex64, complex128        the same
//
// Numerics: products are taken in float64 for float64 and complex128 gradients
// and in float32 for all others, then rounded to the wire dtype, to nearest
// even. The bits are those of at::mul(gradient, scale).to(wire dtype), except:
//   - float16 and bfloat16 gradients are rounded once, not twice;
//   - complex gradients are scaled as two reals, so an infinity in one part
//     makes no NaN in the other;
//   - the payload of a NaN may differ.
// A scale of 1 without a change of dtype copies bits.
//
// Memory: a CPU or CUDA packer allocates at construction only, except for
// CUDA's staging buffers (packer_cuda.cu).
//
// Streams: on devices with streams both calls return before the work is done.
// They enqueue it on the current stream of the packer's device. `flat` and the
// gradients must be ready on that stream, and the result is.
//
// Thread safety: none; calls of one packer must not overlap.
class Packer {
 public:
  virtual ~Packer() = default;

  // For each slot i: flat[offset_i, offset_i + numel_i) = gradients[i] * scale.
  // A null gradient writes zeros. Elements between slots keep their values.
  //
  // REQUIRES: gradients[i] points to numel_i contiguous elements of the
  //     gradient dtype on the packer's device. It overlaps no other gradient,
  //     and overlaps `flat` only if it lies exactly at its own slot and the
  //     dtypes are equal; it is then scaled in place.
  // Errors: ValueError if the number of gradients is not the number of slots,
  //     or `flat` is not a contiguous tensor of a wire dtype that holds all
  //     slots.
  virtual void pack(std::span<const void* const> gradients,
                    const at::Tensor& flat /* 1D, [numel] */, double scale) = 0;

  // For each slot i: gradients[i] = flat[offset_i, offset_i + numel_i). Skips
  // null gradients and those that lie at their own slot.
  // REQUIRES and Errors: as pack().
  virtual void unpack(const at::Tensor& flat /* 1D, [numel] */,
                      std::span<void* const> gradients) = 0;
};

// REQUIRES: the slots are ascending and do not overlap.
// Errors: ValueError if `device` is meta or `gradient_dtype` is not in the
//     table above; RuntimeError for a CUDA device in a build without CUDA.
std::unique_ptr<Packer> make_packer(at::Device device,
                                    at::ScalarType gradient_dtype,
                                    std::vector<SlotRange> slots);

// ---- For implementations of Packer.

namespace packing {

// The arguments that a packer expects in its calls.
struct PackerArguments {
  at::Device device;  // with an index, unless it is the CPU
  at::ScalarType gradient_dtype;
  size_t num_slots;
  int64_t min_flat_numel;  // end of the last slot

  // A complex number is packed as two reals.
  at::ScalarType real_dtype() const {
    return c10::toRealValueType(gradient_dtype);
  }

  // False if a product with `scale` keeps the bits of every gradient.
  bool changes_values(double scale) const {
    return real_dtype() == at::kDouble ? scale != 1.0
                                       : static_cast<float>(scale) != 1.0F;
  }

  // Throws the errors of Packer::pack and unpack.
  void check(const char* function, size_t num_gradients,
             const at::Tensor& flat) const;
};

// `slots`: in elements of the real dtype.
std::unique_ptr<Packer> make_cuda_packer(PackerArguments arguments,
                                         std::vector<SlotRange> slots);

// Loops of the CPU packer over all slots of a bucket; `flat` is the first
// element of the buffer. Contract: Packer::pack and unpack, for real dtypes.
using PackLoop = void (*)(std::span<const SlotRange> slots,
                          const void* const* gradients, void* flat,
                          double scale);
using UnpackLoop = void (*)(std::span<const SlotRange> slots, const void* flat,
                            void* const* gradients);

struct PackLoops {
  PackLoop pack = nullptr;
  UnpackLoop unpack = nullptr;
};

// Plain C++. Nulls for pairs that are not in the table of wire dtypes.
PackLoops portable_pack_loops(at::ScalarType gradient, at::ScalarType wire);

// Vector instructions of this processor, with the bits of the portable loops
// (NaN payloads excepted). Also null if the processor has none.
PackLoops native_pack_loops(at::ScalarType gradient, at::ScalarType wire);

// Calls `visit.operator()<Gradient, Wire>()` for a real pair in the table of
// wire dtypes; returns a default-constructed result for others.
template <typename Visitor>
auto visit_pair(at::ScalarType gradient, at::ScalarType wire, Visitor visit) {
  auto visit_wire = [&]<typename Gradient>() {
    switch (wire) {
      case at::kFloat:
        return visit.template operator()<Gradient, float>();
      case at::kHalf:
        return visit.template operator()<Gradient, at::Half>();
      case at::kBFloat16:
        return visit.template operator()<Gradient, at::BFloat16>();
      default:
        return decltype(visit.template operator()<Gradient, float>()){};
    }
  };
  switch (gradient) {
    case at::kFloat:
      return visit_wire.template operator()<float>();
    case at::kHalf:
      return visit_wire.template operator()<at::Half>();
    case at::kBFloat16:
      return visit_wire.template operator()<at::BFloat16>();
    case at::kDouble:
      if (wire == at::kDouble) {
        return visit.template operator()<double, double>();
      }
      return visit_wire.template operator()<double>();
    default:
      return decltype(visit.template operator()<float, float>()){};
  }
}

// The type of products of gradients of type T.
template <typename T>
using Product = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Casts float64 to float16 or bfloat16 through float32, as ATen does.
template <typename To, typename From>
C10_HOST_DEVICE inline To cast(From value) {
  if constexpr (std::is_same_v<To, double> || std::is_same_v<To, float>) {
    return static_cast<To>(value);
  } else {
    return static_cast<To>(static_cast<float>(value));
  }
}

}  // namespace packing
}  // namespace brigade

#endif  // BRIGADE_REDUCER_PACKING_PACKER_H_
