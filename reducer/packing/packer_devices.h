// The packers of each kind of device, for make_packer() alone: arguments have
// been checked.  A build without CUDA has a make_cuda_packer() that throws.

#ifndef BRIGADE_REDUCER_PACKING_PACKER_DEVICES_H_
#define BRIGADE_REDUCER_PACKING_PACKER_DEVICES_H_

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "brigade/reducer/packing/packer.h"

namespace brigade {

std::unique_ptr<Packer> make_cpu_packer(at::ScalarType gradient_dtype,
                                        std::vector<SlotRange> slots);

// `device` has an index.
std::unique_ptr<Packer> make_cuda_packer(at::Device device,
                                         at::ScalarType gradient_dtype,
                                         std::vector<SlotRange> slots);

// For every other device, by ATen's operators. `device` has an index.
std::unique_ptr<Packer> make_generic_packer(at::Device device,
                                            at::ScalarType gradient_dtype,
                                            std::vector<SlotRange> slots);

}  // namespace brigade

#endif  // BRIGADE_REDUCER_PACKING_PACKER_DEVICES_H_
