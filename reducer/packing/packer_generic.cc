// Packs by ATen's operators, one or two per slot, over the gradients' memory:
// for devices that have no packer of their own.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/ScalarType.h>

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "brigade/reducer/packing/packer_devices.h"

namespace brigade {
namespace {

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
      const at::Tensor place = place_in(reals, i);
      if (gradients[i] == nullptr) {
        place.zero_();
      } else if (gradients[i] != place.const_data_ptr()) {
        copy_scaled(tensor_at(const_cast<void*>(gradients[i]), i), place,
                    scale);
      } else if (scale != 1.0) {
        copy_scaled(place, place, scale);
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
      const at::Tensor place = place_in(reals, i);
      if (slots_[i].numel == 0 || gradients[i] == nullptr ||
          gradients[i] == place.const_data_ptr()) {
        continue;
      }
      tensor_at(gradients[i], i).copy_(place);
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

  at::Tensor place_in(const at::Tensor& reals, size_t slot) const {
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

std::unique_ptr<Packer> make_generic_packer(PackerArguments arguments,
                                            std::vector<SlotRange> slots) {
  return std::make_unique<GenericPacker>(arguments, std::move(slots));
}

}  // namespace brigade
