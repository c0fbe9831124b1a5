// The packers of each kind of device, for make_packer() alone: arguments have
// been checked.  A build without CUDA has a make_cuda_packer() that throws.

#ifndef BRIGADE_ENGINE_PACKER_DEVICES_H_
#define BRIGADE_ENGINE_PACKER_DEVICES_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "brigade/engine/packer.h"

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

// Whether gradients of one dtype may travel as the other: the table in
// packer.h.
bool can_travel_as(at::ScalarType gradient_dtype, at::ScalarType wire_dtype);

// Throws the errors that Packer::pack and unpack promise.
struct PackerArguments {
  at::Device device;
  at::ScalarType gradient_dtype;
  size_t num_slots;
  int64_t min_flat_numel;  // where the last slot ends

  void check(const char* function, size_t num_gradients,
             const at::Tensor& flat) const;
};

PackerArguments arguments_of(at::Device device, at::ScalarType gradient_dtype,
                             const std::vector<SlotRange>& slots);

}  // namespace brigade

#endif  // BRIGADE_ENGINE_PACKER_DEVICES_H_
