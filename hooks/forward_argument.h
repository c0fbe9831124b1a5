// An argument on its way to a module's forward.
//
// Thread safety: none.

#ifndef BRIGADE_HOOKS_FORWARD_ARGUMENT_H_
#define BRIGADE_HOOKS_FORWARD_ARGUMENT_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "brigade/hooks/output_tensors.h"
#include "brigade/hooks/tensor_casts.h"
#include "brigade/hooks/tensor_nest.h"

namespace brigade {

// The caller's own argument, or, where a precision is wanted and it holds
// floating-point tensors of another one, a copy of it with those cast. `T`: as
// forwarded. Searched are the nests of tensor_nest.h, IValues and vectors of
// these.
template <typename T>
class ForwardArgument {
 public:
  // REQUIRES: `value` outlives this object.
  ForwardArgument(T&& value, std::optional<at::ScalarType> dtype)
      : value_(std::forward<T>(value)) {
    if constexpr (kCanBeCast) {
      if (!dtype || !differs(value_, *dtype)) return;
      cast_.emplace(std::forward<T>(value));
      if constexpr (kIsIValue) {
        *cast_ = in_precision(*cast_, *dtype);
      } else if constexpr (kIsIValueList) {
        for (c10::IValue& part : *cast_) part = in_precision(part, *dtype);
      } else {
        for_each_tensor(*cast_, [&dtype](at::Tensor& tensor) {
          tensor = in_precision(tensor, *dtype);
        });
      }
    }
  }

  T&& get() {
    if constexpr (kCanBeCast) {
      if (cast_) return static_cast<T&&>(*cast_);
    }
    return static_cast<T&&>(value_);
  }

  ForwardArgument(const ForwardArgument&) = delete;
  ForwardArgument& operator=(const ForwardArgument&) = delete;

 private:
  using Value = std::remove_cvref_t<T>;
  static constexpr bool kIsIValue = std::is_same_v<Value, c10::IValue>;
  static constexpr bool kIsIValueList =
      std::is_same_v<Value, std::vector<c10::IValue>>;
  static constexpr bool kCanBeCast =
      kIsIValue || kIsIValueList || HoldsTensors<Value>;

  struct Nothing {};

  static bool differs(const Value& value, at::ScalarType dtype) {
    bool found = false;
    const auto look = [&](const at::Tensor& tensor) {
      found = found || (tensor.defined() && tensor.is_floating_point() &&
                        tensor.scalar_type() != dtype);
    };
    if constexpr (HoldsTensors<Value>) {
      for_each_tensor(value, look);
    } else {
      for (const at::Tensor& tensor : tensors_of(value)) look(tensor);
    }
    return found;
  }

  T&& value_;
  std::conditional_t<kCanBeCast, std::optional<Value>, Nothing> cast_;
};

}  // namespace brigade

#endif  // BRIGADE_HOOKS_FORWARD_ARGUMENT_H_
