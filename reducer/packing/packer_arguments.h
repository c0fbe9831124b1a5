// What packers are given, checked: the errors that packer.h promises.

#ifndef BRIGADE_REDUCER_PACKING_PACKER_ARGUMENTS_H_
#define BRIGADE_REDUCER_PACKING_PACKER_ARGUMENTS_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "brigade/reducer/packing/packer.h"

namespace brigade {

// One of the table's, as a gradient.
bool is_supported_gradient(at::ScalarType dtype);

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

#endif  // BRIGADE_REDUCER_PACKING_PACKER_ARGUMENTS_H_
