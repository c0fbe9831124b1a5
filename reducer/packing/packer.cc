#include "brigade/reducer/packing/packer.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <utility>

namespace brigade {
namespace packing {
namespace {

bool is_real(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16 ||
         dtype == at::kDouble;
}

bool is_supported_gradient(at::ScalarType dtype) {
  return is_real(dtype) || dtype == at::kComplexFloat ||
         dtype == at::kComplexDouble;
}

// The table of wire dtypes in packer.h.
bool is_wire_dtype_of(at::ScalarType gradient_dtype,
                      at::ScalarType wire_dtype) {
  if (gradient_dtype == wire_dtype) return is_supported_gradient(wire_dtype);
  return is_real(gradient_dtype) && is_real(wire_dtype) &&
         wire_dtype != at::kDouble;
}

// Packer for devices other than the CPU and CUDA: one or two ATen operators per
// slot.
class GenericPacker final : public Packer {
 public:
  GenericPacker(PackerArguments arguments, std::vector<SlotRange> slots)
      : arguments_(arguments),
        options_(
            at::TensorOptions(arguments.real_dtype()).device(arguments.device)),
        slots_(std::move(slots)) {}

  void pack(std::span<const void* const> gradients, const at::Tensor& flat,
            double scale) override {
    arguments_.check("Packer::pack", gradients.size(), flat);
    const c10::DeviceGuard on_device(arguments_.device);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const at::Tensor reals = as_reals(flat);
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (slots_[i].numel == 0) continue;
      const at::Tensor slot = slot_of(reals, i);
      if (gradients[i] == nullptr) {
        slot.zero_();
      } else if (gradients[i] != slot.const_data_ptr()) {
        copy_scaled(tensor_at(const_cast<void*>(gradients[i]), i), slot, scale);
      } else if (scale != 1.0) {
        copy_scaled(slot, slot, scale);
      }
    }
  }

  void unpack(const at::Tensor& flat,
              std::span<void* const> gradients) override {
    arguments_.check("Packer::unpack", gradients.size(), flat);
    const c10::DeviceGuard on_device(arguments_.device);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const at::Tensor reals = as_reals(flat);
    for (size_t i = 0; i < slots_.size(); ++i) {
      const at::Tensor slot = slot_of(reals, i);
      if (slots_[i].numel == 0 || gradients[i] == nullptr ||
          gradients[i] == slot.const_data_ptr()) {
        continue;
      }
      tensor_at(gradients[i], i).copy_(slot);
    }
  }

 private:
  static at::Tensor as_reals(const at::Tensor& flat) {
    return flat.is_complex() ? at::view_as_real(flat).view(-1) : flat;
  }

  // Operators in half precision may round the scale before they multiply.
  static void copy_scaled(const at::Tensor& from, const at::Tensor& to,
                          double scale) {
    if (scale == 1.0) {
      to.copy_(from);
      return;
    }
    const at::ScalarType product =
        from.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    to.copy_(from.to(product).mul(scale));
  }

  at::Tensor slot_of(const at::Tensor& reals, size_t slot) const {
    return reals.narrow(0, slots_[slot].offset_numel, slots_[slot].numel);
  }

  at::Tensor tensor_at(void* elements, size_t slot) const {
    return at::for_blob(elements, {slots_[slot].numel})
        .options(options_)
        .target_device(arguments_.device)
        .make_tensor();
  }

  // Constant after construction.
  const PackerArguments arguments_;
  const at::TensorOptions options_;     // of the gradients, as reals
  const std::vector<SlotRange> slots_;  // in reals
};

}  // namespace

void PackerArguments::check(const char* function, size_t num_gradients,
                            const at::Tensor& flat) const {
  TORCH_CHECK_VALUE(
      num_gradients == num_slots && flat.defined() && flat.device() == device &&
          is_wire_dtype_of(gradient_dtype, flat.scalar_type()) &&
          flat.is_contiguous() && flat.numel() >= min_flat_numel,
      function, ": expected ", num_slots,
      " gradients and a contiguous bucket buffer of at least ", min_flat_numel,
      " elements on ", device, " in a wire dtype for ", gradient_dtype,
      " gradients, found ", num_gradients, " gradients and ",
      flat.defined() ? flat.toString() : "no tensor", " of strides ",
      flat.defined() ? flat.strides() : at::IntArrayRef(), " and sizes ",
      flat.defined() ? flat.sizes() : at::IntArrayRef(),
      ".\nDo not resize or replace the bucket's buffer in the comm hook.");
}

}  // namespace packing

std::unique_ptr<Packer> make_packer(at::Device device,
                                    at::ScalarType gradient_dtype,
                                    std::vector<SlotRange> slots) {
  TORCH_CHECK_VALUE(
      packing::is_supported_gradient(gradient_dtype),
      "make_packer: expected gradients of a floating-point or complex dtype "
      "(float32, float64, float16, bfloat16, complex64, complex128), found ",
      gradient_dtype, ".\nCast the parameters to one of them.");
  TORCH_CHECK_VALUE(
      !device.is_meta(), "make_packer: expected a device with memory, found ",
      device, ".\nMove the parameters to the CPU or to an accelerator.");
  if (!device.is_cpu() && !device.has_index()) {
    device = c10::impl::VirtualGuardImpl(device.type()).getDevice();
  }
  const packing::PackerArguments arguments = {
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
  if (device.is_cpu()) {
    return packing::make_cpu_packer(arguments, std::move(slots));
  }
  if (device.is_cuda()) {
    return packing::make_cuda_packer(arguments, std::move(slots));
  }
  return std::make_unique<packing::GenericPacker>(arguments, std::move(slots));
}

}  // namespace brigade
