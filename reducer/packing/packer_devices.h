// The packers of each kind of device, for make_packer() alone, and their
// arithmetic. A build without CUDA has a make_cuda_packer() that throws.

#ifndef BRIGADE_REDUCER_PACKING_PACKER_DEVICES_H_
#define BRIGADE_REDUCER_PACKING_PACKER_DEVICES_H_

#include <ATen/core/Tensor.h>
#include <c10/macros/Macros.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>
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

  // False if a product with `scale` keeps the bits of every gradient.
  bool changes_values(double scale) const {
    return real_dtype() == at::kDouble ? scale != 1.0
                                       : static_cast<float>(scale) != 1.0F;
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

// Calls `visit.operator()<Gradient, Wire>()` for a real pair in the table in
// packer.h; returns a default-made result for others.
template <typename Visitor>
auto visit_pair(at::ScalarType gradient, at::ScalarType wire, Visitor visit) {
  auto visit_wire = [&]<typename Gradient>() {
    switch (wire) {
      case at::kFloat:
        return visit.template operator()<Gradient, float>();
      case at::kHalf:
        return visit.template operator()<Gradient, at::Half>();
      case at::kBFloat16:
        return visit.template operator()<Gradient, at::BFloat16>();
      default:
        return decltype(visit.template operator()<Gradient, float>()){};
    }
  };
  switch (gradient) {
    case at::kFloat:
      return visit_wire.template operator()<float>();
    case at::kHalf:
      return visit_wire.template operator()<at::Half>();
    case at::kBFloat16:
      return visit_wire.template operator()<at::BFloat16>();
    case at::kDouble:
      if (wire == at::kDouble) {
        return visit.template operator()<double, double>();
      }
      return visit_wire.template operator()<double>();
    default:
      return decltype(visit.template operator()<float, float>()){};
  }
}

// Products of gradients of type T are taken in this type.
template <typename T>
using Product = std::conditional_t<std::is_same_v<T, double>, double, float>;

// float64 becomes float16 or bfloat16 by way of float32, as in ATen.
template <typename To, typename From>
C10_HOST_DEVICE inline To cast(From value) {
  if constexpr (std::is_same_v<To, double> || std::is_same_v<To, float>) {
    return static_cast<To>(value);
  } else {
    return static_cast<To>(static_cast<float>(value));
  }
}

}  // namespace brigade

#endif  // BRIGADE_REDUCER_PACKING_PACKER_DEVICES_H_
