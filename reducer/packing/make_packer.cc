#include "brigade/reducer/packing/make_packer.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <utility>

#include "brigade/reducer/packing/packer_arguments.h"
#include "brigade/reducer/packing/packer_devices.h"

namespace brigade {
namespace {

void check_slots(const std::vector<SlotRange>& slots) {
  int64_t end = 0;
  for (size_t i = 0; i < slots.size(); ++i) {
    TORCH_CHECK_VALUE(
        slots[i].numel >= 0 && slots[i].offset_numel >= end,
        "make_packer: expected slots in ascending order without overlap, found "
        "slot ",
        i, " at offset ", slots[i].offset_numel, " with ", slots[i].numel,
        " elements, where offset ", end,
        " is the first that is free.\nSort the slots by their offsets.");
    end = slots[i].offset_numel + slots[i].numel;
  }
}

}  // namespace

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
  check_slots(slots);
  if (device.is_cpu()) {
    return make_cpu_packer(gradient_dtype, std::move(slots));
  }
  if (!device.has_index()) {
    device = c10::impl::VirtualGuardImpl(device.type()).getDevice();
  }
  if (device.is_cuda()) {
    return make_cuda_packer(device, gradient_dtype, std::move(slots));
  }
  return make_generic_packer(device, gradient_dtype, std::move(slots));
}

}  // namespace brigade
