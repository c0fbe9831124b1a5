// Makes the packer of a device.

#ifndef BRIGADE_REDUCER_PACKING_MAKE_PACKER_H_
#define BRIGADE_REDUCER_PACKING_MAKE_PACKER_H_

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "brigade/reducer/packing/packer.h"

namespace brigade {

// REQUIRES: nothing; everything is checked.
// Errors: ValueError if `device` has no memory (meta), `gradient_dtype` is none
//     of the table's, or the slots are not ascending or overlap; RuntimeError
//     for a CUDA device in a build without CUDA.
std::unique_ptr<Packer> make_packer(at::Device device,
                                    at::ScalarType gradient_dtype,
                                    std::vector<SlotRange> slots);

}  // namespace brigade

#endif  // BRIGADE_REDUCER_PACKING_MAKE_PACKER_H_
