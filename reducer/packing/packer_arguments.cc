#include "brigade/reducer/packing/packer_arguments.h"

#include <c10/util/Exception.h>

namespace brigade {
namespace {

bool is_real(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16 ||
         dtype == at::kDouble;
}

}  // namespace

bool is_supported_gradient(at::ScalarType dtype) {
  return is_real(dtype) || dtype == at::kComplexFloat ||
         dtype == at::kComplexDouble;
}

bool can_travel_as(at::ScalarType gradient_dtype, at::ScalarType wire_dtype) {
  if (gradient_dtype == wire_dtype) return is_supported_gradient(wire_dtype);
  return is_real(gradient_dtype) && is_real(wire_dtype) &&
         wire_dtype != at::kDouble;
}

PackerArguments arguments_of(at::Device device, at::ScalarType gradient_dtype,
                             const std::vector<SlotRange>& slots) {
  const int64_t end =
      slots.empty() ? 0 : slots.back().offset_numel + slots.back().numel;
  return {.device = device,
          .gradient_dtype = gradient_dtype,
          .num_slots = slots.size(),
          .min_flat_numel = end};
}

void PackerArguments::check(const char* function, size_t num_gradients,
                            const at::Tensor& flat) const {
  TORCH_CHECK_VALUE(num_gradients == num_slots, function, ": expected ",
                    num_slots, " gradients, one for each slot, found ",
                    num_gradients,
                    ".\nPass a null pointer for a missing gradient.");
  TORCH_CHECK_VALUE(flat.defined() && flat.device() == device, function,
                    ": expected a flat buffer on ", device, ", found ",
                    flat.defined() ? flat.device().str() : "no tensor",
                    ".\nPass the buffer that the packer was made for.");
  TORCH_CHECK_VALUE(can_travel_as(gradient_dtype, flat.scalar_type()), function,
                    ": expected a flat buffer of a dtype that ", gradient_dtype,
                    " gradients can travel as, found ", flat.scalar_type(),
                    ".\nUse the gradients' own dtype, or float32, float16 or "
                    "bfloat16 for real gradients.");
  TORCH_CHECK_VALUE(
      flat.is_contiguous() && flat.numel() >= min_flat_numel, function,
      ": expected a contiguous flat buffer of at least ", min_flat_numel,
      " elements, found ", flat.is_contiguous() ? "" : "a strided one of ",
      flat.numel(), ".\nPass the buffer that the packer was made for.");
}

}  // namespace brigade
