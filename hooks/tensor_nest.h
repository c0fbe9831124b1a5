// Visits the tensors of a nest so that they can be replaced.
//
// What output_tensors.h does for reading, with fewer types: a struct of the
// user's cannot be opened for writing.
//
// Thread safety: pure.

#ifndef BRIGADE_HOOKS_TENSOR_NEST_H_
#define BRIGADE_HOOKS_TENSOR_NEST_H_

#include <ATen/core/Tensor.h>

#include <array>
#include <map>
#include <optional>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace brigade {

// A tensor, or vectors, arrays, maps (their values), pairs, tuples and
// optionals of such; numbers may be in between.
template <typename T>
inline constexpr bool IsTensorNest =
    std::is_same_v<T, at::Tensor> || std::is_arithmetic_v<T>;
template <typename T, typename A>
inline constexpr bool IsTensorNest<std::vector<T, A>> = IsTensorNest<T>;
template <typename T, size_t N>
inline constexpr bool IsTensorNest<std::array<T, N>> = IsTensorNest<T>;
template <typename T>
inline constexpr bool IsTensorNest<std::optional<T>> = IsTensorNest<T>;
template <typename K, typename V, typename C, typename A>
inline constexpr bool IsTensorNest<std::map<K, V, C, A>> = IsTensorNest<V>;
template <typename K, typename V, typename H, typename E, typename A>
inline constexpr bool IsTensorNest<std::unordered_map<K, V, H, E, A>> =
    IsTensorNest<V>;
template <typename A, typename B>
inline constexpr bool IsTensorNest<std::pair<A, B>> =
    IsTensorNest<std::remove_const_t<A>>&& IsTensorNest<B>;
template <typename... Ts>
inline constexpr bool IsTensorNest<std::tuple<Ts...>> = (IsTensorNest<Ts> &&
                                                         ...);

// Whether there are tensors in such a nest, whatever else is in it.
template <typename T>
inline constexpr bool HoldsTensors = std::is_same_v<T, at::Tensor>;
template <typename T, typename A>
inline constexpr bool HoldsTensors<std::vector<T, A>> = HoldsTensors<T>;
template <typename T, size_t N>
inline constexpr bool HoldsTensors<std::array<T, N>> = HoldsTensors<T>;
template <typename T>
inline constexpr bool HoldsTensors<std::optional<T>> = HoldsTensors<T>;
template <typename K, typename V, typename C, typename A>
inline constexpr bool HoldsTensors<std::map<K, V, C, A>> = HoldsTensors<V>;
template <typename K, typename V, typename H, typename E, typename A>
inline constexpr bool HoldsTensors<std::unordered_map<K, V, H, E, A>> =
    HoldsTensors<V>;
template <typename A, typename B>
inline constexpr bool HoldsTensors<std::pair<A, B>> =
    HoldsTensors<A> || HoldsTensors<B>;
template <typename... Ts>
inline constexpr bool HoldsTensors<std::tuple<Ts...>> = (HoldsTensors<Ts> ||
                                                         ...);

// Calls `visit` with a reference to each tensor, undefined ones too, as const
// as `nest` is.
template <typename T, typename Visit>
void for_each_tensor(T& nest, const Visit& visit) {
  using Nest = std::remove_const_t<T>;
  if constexpr (std::is_same_v<Nest, at::Tensor>) {
    visit(nest);
  } else if constexpr (!HoldsTensors<Nest>) {
    // of no interest
  } else if constexpr (requires { nest.has_value(); }) {
    if (nest.has_value()) for_each_tensor(*nest, visit);
  } else if constexpr (requires { typename Nest::mapped_type; }) {
    for (auto& [key, value] : nest) for_each_tensor(value, visit);
  } else if constexpr (requires { nest.begin(); }) {
    for (auto& element : nest) for_each_tensor(element, visit);
  } else {
    std::apply([&](auto&... parts) { (for_each_tensor(parts, visit), ...); },
               nest);
  }
}

}  // namespace brigade

#endif  // BRIGADE_HOOKS_TENSOR_NEST_H_
