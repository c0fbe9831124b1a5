// The packers of each kind of device, for make_packer() alone. A build without
// CUDA has a make_cuda_packer() that throws.

#ifndef BRIGADE_REDUCER_PACKING_PACKER_DEVICES_H_
#define BRIGADE_REDUCER_PACKING_PACKER_DEVICES_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "brigade/reducer/packing/packer.h"

namespace brigade {

// The arguments that every packer expects in its calls.
struct PackerArguments {
  at::Device device;  // with an index, unless it is the CPU
  at::ScalarType gradient_dtype;
  size_t num_slots;
  int64_t min_flat_numel;  // where the last slot ends

  // A complex number is packed as two reals.
  at::ScalarType real_dtype() const {
    return c10::toRealValueType(gradient_dtype);
  }

  // Throws the errors that Packer::pack and unpack promise.
  void check(const char* function, size_t num_gradients,
             const at::Tensor& flat) const;
};

// `slots`: in elements of the real dtype.
std::unique_ptr<Packer> make_cpu_packer(PackerArguments arguments,
                                        std::vector<SlotRange> slots);
std::unique_ptr<Packer> make_cuda_packer(PackerArguments arguments,
                                         std::vector<SlotRange> slots);

// For every other device, by ATen's operators.
std::unique_ptr<Packer> make_generic_packer(PackerArguments arguments,
                                            std::vector<SlotRange> slots);

}  // namespace brigade

#endif  // BRIGADE_REDUCER_PACKING_PACKER_DEVICES_H_
