// Finds the tensors in whatever a module's forward returns.
//
// Understood are tensors and any nest of vectors, arrays, spans, lists, maps,
// pairs, tuples, optionals, variants and IValues of them; LibTorch's own return
// types are tuples and vectors. A type of yours does not compile until you open
// it by an overload of collect_tensors() in its namespace:
//
//   namespace mine {
//   struct Output { at::Tensor logits; at::Tensor features; };
//   void collect_tensors(const Output& output, std::vector<at::Tensor>& found)
//   {
//     found.push_back(output.logits);
//     found.push_back(output.features);
//   }
//   }
//
// Thread safety: pure.

#ifndef BRIGADE_HOOKS_OUTPUT_TENSORS_H_
#define BRIGADE_HOOKS_OUTPUT_TENSORS_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <optional>
#include <ranges>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace brigade {

// All tensors in `outputs`, in the order in which they are met. Undefined
// tensors are left out.
template <typename Outputs>
std::vector<at::Tensor> tensors_of(const Outputs& outputs);

namespace output_tensors_detail {

using Found = std::vector<at::Tensor>;

// Chosen when no overload of collect_tensors() is found by argument-dependent
// lookup.
void collect_tensors() = delete;

template <typename T>
concept UserCollectable = requires(const T& value, Found& found) {
  collect_tensors(value, found);
};

template <typename T>
concept TupleLike = requires {
  std::tuple_size<T>::value;
};

template <typename T>
inline constexpr bool kIsOptional = false;
template <typename T>
inline constexpr bool kIsOptional<std::optional<T>> = true;

template <typename T>
inline constexpr bool kIsVariant = false;
template <typename... Ts>
inline constexpr bool kIsVariant<std::variant<Ts...>> = true;

template <typename T>
void visit(const T& value, Found& found) {
  if constexpr (std::is_convertible_v<const T&, const at::Tensor&>) {
    const at::Tensor& tensor = value;
    if (tensor.defined()) found.push_back(tensor);
  } else if constexpr (std::is_same_v<T, c10::IValue>) {
    value.visit([&found](const c10::IValue& part) {
      if (!part.isTensor()) return false;  // go on into its parts
      if (part.toTensor().defined()) found.push_back(part.toTensor());
      return true;
    });
  } else if constexpr (UserCollectable<T>) {
    collect_tensors(value, found);
  } else if constexpr (kIsOptional<T>) {
    if (value.has_value()) visit(*value, found);
  } else if constexpr (kIsVariant<T>) {
    std::visit([&found](const auto& held) { visit(held, found); }, value);
  } else if constexpr (std::is_convertible_v<const T&, std::string_view>) {
    // Text is a range, but of no interest.
  } else if constexpr (std::ranges::input_range<const T>) {
    for (const auto& element : value) visit(element, found);
  } else if constexpr (TupleLike<T>) {
    std::apply([&found](const auto&... parts) { (visit(parts, found), ...); },
               value);
  } else {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>,
                  "brigade can't find the tensors in this type: overload "
                  "collect_tensors(const T&, std::vector<at::Tensor>&) in its "
                  "namespace (brigade/hooks/output_tensors.h)");
  }
}

}  // namespace output_tensors_detail

template <typename Outputs>
std::vector<at::Tensor> tensors_of(const Outputs& outputs) {
  std::vector<at::Tensor> found;
  output_tensors_detail::visit(outputs, found);
  return found;
}

}  // namespace brigade

#endif  // BRIGADE_HOOKS_OUTPUT_TENSORS_H_
