// Casts the floating tensors of whatever a module's forward returns.
//
// Understood are the nests of output_tensors.h. A type of yours that is opened
// for reading by collect_tensors() is opened for writing by an overload of
// visit_tensors() in its namespace:
//
//   void visit_tensors(Output& output, const brigade::TensorVisit& visit) {
//     visit(output.logits);
//     visit(output.features);
//   }
//
// Thread safety: pure.

#ifndef BRIGADE_HOOKS_TENSOR_CASTS_H_
#define BRIGADE_HOOKS_TENSOR_CASTS_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <ranges>
#include <span>
#include <tuple>
#include <type_traits>
#include <variant>

#include "brigade/hooks/output_tensors.h"

namespace brigade {

using TensorVisit = std::function<void(at::Tensor&)>;

// A floating-point tensor in `dtype`, and part of the same graph; any other,
// also an undefined one, as it is.
at::Tensor in_precision(const at::Tensor& tensor, at::ScalarType dtype);

// The same for the tensors of lists, tuples and dictionaries.
c10::IValue in_precision(const c10::IValue& value, at::ScalarType dtype);

// Puts tensors in `dtype` in place of the floating ones in `nest`.
//
// Errors: ValueError if there are some in another dtype that can't be replaced:
// constants, or those of a type without visit_tensors().
template <typename Nest>
void cast_tensors(Nest& nest, at::ScalarType dtype);

namespace tensor_casts_detail {

// Chosen when no overload of visit_tensors() is found by argument-dependent
// lookup.
void visit_tensors() = delete;

template <typename T>
concept UserVisitable = requires(T& value, const TensorVisit& visit) {
  visit_tensors(value, visit);
};

// c10::List, whose elements are proxies.
template <typename T>
concept ProxyList = requires(T& list) {
  list.set(0, list.get(0));
  list.copy();
};

template <typename T>
concept MutableRange = std::ranges::input_range<T> &&
    std::is_lvalue_reference_v<std::ranges::range_reference_t<T>> &&
    !std::is_const_v<
        std::remove_reference_t<std::ranges::range_reference_t<T>>>;

// What can't be replaced stays, for require_cast() to find.
template <typename T>
void cast(T& value, at::ScalarType dtype) {
  if constexpr (std::is_const_v<T>) {
    return;
  } else if constexpr (std::is_same_v<T, at::Tensor> ||
                       std::is_same_v<T, c10::IValue>) {
    value = in_precision(value, dtype);
  } else if constexpr (UserVisitable<T>) {
    visit_tensors(value, [dtype](at::Tensor& tensor) {
      tensor = in_precision(tensor, dtype);
    });
  } else if constexpr (output_tensors_detail::kIsOptional<T>) {
    if (value.has_value()) cast(*value, dtype);
  } else if constexpr (output_tensors_detail::kIsVariant<T>) {
    std::visit([dtype](auto& held) { cast(held, dtype); }, value);
  } else if constexpr (ProxyList<T>) {
    value = value.copy();  // others may hold the list
    for (size_t i = 0; i < value.size(); ++i) {
      auto element = value.get(i);
      cast(element, dtype);
      value.set(i, std::move(element));
    }
  } else if constexpr (MutableRange<T>) {
    for (auto& element : value) cast(element, dtype);
  } else if constexpr (output_tensors_detail::TupleLike<T>) {
    std::apply([dtype](auto&... parts) { (cast(parts, dtype), ...); }, value);
  }
}

void require_cast(std::span<const at::Tensor> tensors, at::ScalarType dtype);

}  // namespace tensor_casts_detail

template <typename Nest>
void cast_tensors(Nest& nest, at::ScalarType dtype) {
  tensor_casts_detail::cast(nest, dtype);
  tensor_casts_detail::require_cast(tensors_of(nest), dtype);
}

}  // namespace brigade

#endif  // BRIGADE_HOOKS_TENSOR_CASTS_H_
