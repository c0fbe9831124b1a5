// Copies gradients into a flat bucket buffer and out of it, in one pass: copy,
// scale and cast together.  Decides how the bytes move on a device; decides
// neither where a slot lies in a bucket (planning/), nor the scale and the wire
// dtype (the comm hook), nor when a bucket is full (the engine).

#ifndef BRIGADE_REDUCER_PACKING_PACKER_H_
#define BRIGADE_REDUCER_PACKING_PACKER_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace brigade {

// Where one gradient lies in a flat bucket buffer, in elements.
struct SlotRange {
  int64_t offset_numel = 0;
  int64_t numel = 0;  // may be 0
};

// Wire dtypes, the dtypes of `flat`:
//
//   gradient dtype               wire dtype
//   float32, float16, bfloat16   float32, float16, bfloat16
//   float64                      float64, float32, float16, bfloat16
//   complex64, complex128        the same
//
// Numbers: a product is taken in float64 for float64 and complex128 and in
// float32 for all others, then rounded to the wire dtype, to nearest even.
// These are the bits of at::mul(gradient, scale).to(wire dtype), but for
//   - float16 and bfloat16 gradients, which are rounded once, not twice;
//   - complex gradients: two reals are scaled, so that an infinity in one part
//     makes no NaN in the other;
//   - NaN: it stays NaN, with a payload of its own.
// A scale of 1 without a change of dtype copies bits.
//
// On the CPU and on CUDA a packer allocates nothing after its construction, but
// for CUDA's staging buffers (see packer_cuda.cu).  On devices with streams
// both calls return before the work is done: it is ordered on the current
// stream of the packer's device, which is where `flat` and the gradients must
// be ready, and where the result is.
//
// Thread safety: none; calls of one packer must not overlap.
class Packer {
 public:
  virtual ~Packer() = default;

  // For each slot i: flat[offset_i, offset_i + numel_i) = gradients[i] * scale.
  // A null gradient writes zeros.  A gradient may lie exactly at its place in
  // `flat` if the dtypes are equal: it is then scaled in place.  What lies
  // between slots is left alone.
  //
  // REQUIRES: gradients[i] is dense memory of numel_i elements of the gradient
  //     dtype on the packer's device, in the order that `flat` shall have; it
  //     overlaps no other gradient, and `flat` only as said above.
  // Errors: ValueError if the number of gradients is not the number of slots,
  //     or `flat` is no contiguous tensor of a wire dtype that holds all slots.
  virtual void pack(std::span<const void* const> gradients,
                    const at::Tensor& flat /* 1D, [numel] */, double scale) = 0;

  // For each slot i whose gradient is not null: gradients[i] = flat[offset_i,
  // offset_i + numel_i).  A gradient at its place in `flat` is left alone.
  // REQUIRES and Errors: as pack().
  virtual void unpack(const at::Tensor& flat /* 1D, [numel] */,
                      std::span<void* const> gradients) = 0;
};

// REQUIRES: the slots are ascending and do not overlap.
// Errors: ValueError if `device` has no memory (meta) or `gradient_dtype` is
//     none of the table's; RuntimeError for a CUDA device in a build without
//     CUDA.
std::unique_ptr<Packer> make_packer(at::Device device,
                                    at::ScalarType gradient_dtype,
                                    std::vector<SlotRange> slots);

}  // namespace brigade

#endif  // BRIGADE_REDUCER_PACKING_PACKER_H_
