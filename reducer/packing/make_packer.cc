#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <utility>

#include "brigade/reducer/packing/packer.h"
#include "brigade/reducer/packing/packer_devices.h"

namespace brigade {
namespace {

bool is_real(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16 ||
         dtype == at::kDouble;
}

bool is_supported_gradient(at::ScalarType dtype) {
  return is_real(dtype) || dtype == at::kComplexFloat ||
         dtype == at::kComplexDouble;
}

// The table in packer.h.
bool can_travel_as(at::ScalarType gradient_dtype, at::ScalarType wire_dtype) {
  if (gradient_dtype == wire_dtype) return is_supported_gradient(wire_dtype);
  return is_real(gradient_dtype) && is_real(wire_dtype) &&
         wire_dtype != at::kDouble;
}

}  // namespace

void PackerArguments::check(const char* function, size_t num_gradients,
                            const at::Tensor& flat) const {
  TORCH_CHECK_VALUE(
      num_gradients == num_slots && flat.defined() && flat.device() == device &&
          can_travel_as(gradient_dtype, flat.scalar_type()) &&
          flat.is_contiguous() && flat.numel() >= min_flat_numel,
      function, ": expected ", num_slots,
      " gradients and a contiguous flat buffer of at least ", min_flat_numel,
      " elements on ", device, " in a dtype that ", gradient_dtype,
      " gradients can travel as, found ", num_gradients, " gradients and ",
      flat.defined() ? flat.toString() : "no tensor", " of strides ",
      flat.defined() ? flat.strides() : at::IntArrayRef(), " and sizes ",
      flat.defined() ? flat.sizes() : at::IntArrayRef(),
      ".\nA comm hook must not change the buffer that it gets.");
}

std::unique_ptr<Packer> make_packer(at::Device device,
                                    at::ScalarType gradient_dtype,
                                    std::vector<SlotRange> slots) {
  TORCH_CHECK_VALUE(
      is_supported_gradient(gradient_dtype),
      "make_packer: expected gradients of a floating-point or complex dtype "
      "(float32, float64, float16, bfloat16, complex64, complex128), found ",
      gradient_dtype, ".\nCast the parameters to one of them.");
  TORCH_CHECK_VALUE(!device.is_meta(),
                    "make_packer: expected a device with memory, found ",
                    device,
                    ".\nMove the parameters to the CPU or to an "
                    "accelerator.");
  if (!device.is_cpu() && !device.has_index()) {
    device = c10::impl::VirtualGuardImpl(device.type()).getDevice();
  }
  const PackerArguments arguments = {
      .device = device,
      .gradient_dtype = gradient_dtype,
      .num_slots = slots.size(),
      .min_flat_numel =
          slots.empty() ? 0 : slots.back().offset_numel + slots.back().numel};
  if (c10::isComplexType(gradient_dtype)) {
    for (SlotRange& slot : slots) {
      slot = {.offset_numel = 2 * slot.offset_numel, .numel = 2 * slot.numel};
    }
  }
  if (device.is_cpu()) return make_cpu_packer(arguments, std::move(slots));
  if (device.is_cuda()) return make_cuda_packer(arguments, std::move(slots));
  return make_generic_packer(arguments, std::move(slots));
}

}  // namespace brigade
