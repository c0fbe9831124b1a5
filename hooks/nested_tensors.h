// Nested tensors: lists and casts the tensors in arguments and results of a
// forward.
//
// A nest is a tensor, or vectors, arrays, spans, maps, pairs, tuples, optionals
// and IValues of tensors in any combination; it may contain numbers and text.
// A result of another type compiles only if its namespace has an overload that
// calls `visit` with each tensor and changes nothing else:
//
//   namespace mine {
//   struct Output { at::Tensor logits; at::Tensor features; };
//   void visit_tensors(Output& output, const brigade::TensorVisit& visit) {
//     visit(output.logits);
//     visit(output.features);
//   }
//   }
//
// Thread safety: pure.

#ifndef BRIGADE_HOOKS_NESTED_TENSORS_H_
#define BRIGADE_HOOKS_NESTED_TENSORS_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <ranges>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace brigade {

using TensorVisit = std::function<void(at::Tensor&)>;

// Returns the defined tensors in `nest`, in traversal order.
template <typename Nest>
std::vector<at::Tensor> tensors_of(const Nest& nest);

// Replaces the floating-point tensors in `nest` with casts to `dtype`, which
// are part of the same graph.
//
// Errors: ValueError if a tensor of another dtype is const.
template <typename Nest>
void cast_tensors(Nest& nest, at::ScalarType dtype);

namespace nested_tensors_detail {

struct Collect {
  void operator()(const at::Tensor& tensor) const;
  void operator()(const c10::IValue& value) const;
  std::vector<at::Tensor>& found;
};

struct Cast {
  void operator()(at::Tensor& tensor) const;
  void operator()(c10::IValue& value) const;
  // Throw if a cast is needed.
  void operator()(const at::Tensor& tensor) const;
  void operator()(const c10::IValue& value) const;
  at::ScalarType dtype;
};

// Fallback when argument-dependent lookup finds no overload of visit_tensors().
void visit_tensors() = delete;

template <typename T>
concept UserVisitable = requires(T& value, const TensorVisit& visit) {
  visit_tensors(value, visit);
};

template <typename T>
concept TupleLike = requires {
  std::tuple_size<T>::value;
};

template <typename T>
inline constexpr bool kIsOptional = false;
template <typename T>
inline constexpr bool kIsOptional<std::optional<T>> = true;

// Returns whether a copy of a T owns its tensors, so that replacing them does
// not change the original.
template <typename T>
constexpr bool owns_tensors() {
  if constexpr (std::is_reference_v<T> || std::is_const_v<T>) {
    return false;
  } else if constexpr (std::is_same_v<T, at::Tensor> ||
                       std::is_same_v<T, c10::IValue>) {
    return true;
  } else if constexpr (kIsOptional<T> || requires {
                         typename T::allocator_type;
                         typename T::value_type;
                       }) {
    return owns_tensors<typename T::value_type>();
  } else if constexpr (TupleLike<T>) {
    return []<size_t... I>(std::index_sequence<I...>) {
      return (owns_tensors<std::tuple_element_t<I, T>>() || ...);
    }
    (std::make_index_sequence<std::tuple_size_v<T>>());
  } else {
    return false;
  }
}

// Calls `visit` with each tensor and IValue in `value`, const if it is const
// there. `kOwnedOnly`: skips values that do not own their tensors, and values
// of unknown type, which otherwise do not compile.
template <bool kOwnedOnly = false, typename T, typename Visit>
void visit_nest(T& value, const Visit& visit) {
  using Value = std::remove_const_t<T>;
  if constexpr (kOwnedOnly && !owns_tensors<Value>()) {
    return;
  } else if constexpr (std::is_convertible_v<T&, at::Tensor&>) {
    visit(static_cast<at::Tensor&>(value));
  } else if constexpr (std::is_convertible_v<T&, const at::Tensor&>) {
    const at::Tensor& tensor = value;
    visit(tensor);
  } else if constexpr (std::is_same_v<Value, c10::IValue>) {
    visit(value);
  } else if constexpr (UserVisitable<Value>) {
    visit_tensors(const_cast<Value&>(value), [&visit](at::Tensor& tensor) {
      if constexpr (std::is_const_v<T>) {
        visit(std::as_const(tensor));
      } else {
        visit(tensor);
      }
    });
  } else if constexpr (kIsOptional<Value>) {
    if (value.has_value()) visit_nest<kOwnedOnly>(*value, visit);
  } else if constexpr (std::is_convertible_v<T&, std::string_view>) {
    return;  // text is a range of numbers
  } else if constexpr (std::ranges::input_range<T>) {
    for (auto&& element : value) visit_nest<kOwnedOnly>(element, visit);
  } else if constexpr (TupleLike<Value>) {
    std::apply(
        [&visit](auto&... parts) {
          (visit_nest<kOwnedOnly>(parts, visit), ...);
        },
        value);
  } else {
    static_assert(
        kOwnedOnly || std::is_arithmetic_v<Value> || std::is_enum_v<Value>,
        "brigade can't find the tensors in this type: overload "
        "visit_tensors(T&, const brigade::TensorVisit&) in its namespace "
        "(brigade/hooks/nested_tensors.h)");
  }
}

}  // namespace nested_tensors_detail

template <typename Nest>
std::vector<at::Tensor> tensors_of(const Nest& nest) {
  std::vector<at::Tensor> found;
  nested_tensors_detail::visit_nest(nest,
                                    nested_tensors_detail::Collect{found});
  return found;
}

template <typename Nest>
void cast_tensors(Nest& nest, at::ScalarType dtype) {
  nested_tensors_detail::visit_nest(nest, nested_tensors_detail::Cast{dtype});
}

// Argument of a module's forward, cast for mixed precision: the caller's own
// value, or a copy with cast tensors if `dtype` is set and differs.
//
// Casts tensors, IValues, and containers, optionals, pairs and tuples that own
// these. Passes on structs, references and spans unchanged. `T`: the type as
// forwarded.
//
// Thread safety: none.
template <typename T>
class ForwardArgument {
 public:
  // `dtype`: unset for no cast. REQUIRES: `value` outlives this object.
  ForwardArgument(T&& value, std::optional<at::ScalarType> dtype)
      : value_(std::forward<T>(value)) {
    if constexpr (kCanBeCast) {
      if (!dtype || !differs(*dtype)) return;
      cast_.emplace(std::forward<T>(value));
      nested_tensors_detail::visit_nest<true>(
          *cast_, nested_tensors_detail::Cast{*dtype});
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
  static constexpr bool kCanBeCast =
      nested_tensors_detail::owns_tensors<Value>();

  struct Nothing {};

  bool differs(at::ScalarType dtype) const {
    std::vector<at::Tensor> tensors;
    nested_tensors_detail::visit_nest<true>(
        std::as_const(value_), nested_tensors_detail::Collect{tensors});
    return std::ranges::any_of(tensors, [&](const at::Tensor& tensor) {
      return tensor.is_floating_point() && tensor.scalar_type() != dtype;
    });
  }

  T&& value_;
  std::conditional_t<kCanBeCast, std::optional<Value>, Nothing> cast_;
};

}  // namespace brigade

#endif  // BRIGADE_HOOKS_NESTED_TENSORS_H_
