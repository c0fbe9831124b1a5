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

// The types of a container's parts; Type is missing for what is no container.
template <typename... Ts>
struct Parts {
  using Type = Parts;
};
template <typename T>
struct PartsOf {};
template <typename T, typename A>
struct PartsOf<std::vector<T, A>> : Parts<T> {};
template <typename T, size_t N>
struct PartsOf<std::array<T, N>> : Parts<T> {};
template <typename T>
struct PartsOf<std::optional<T>> : Parts<T> {};
template <typename K, typename V, typename C, typename A>
struct PartsOf<std::map<K, V, C, A>> : Parts<V> {};
template <typename K, typename V, typename H, typename E, typename A>
struct PartsOf<std::unordered_map<K, V, H, E, A>> : Parts<V> {};
template <typename A, typename B>
struct PartsOf<std::pair<A, B>> : Parts<A, B> {};
template <typename... Ts>
struct PartsOf<std::tuple<Ts...>> : Parts<Ts...> {};

template <typename T, typename = void>
inline constexpr bool IsTensorNest =
    std::is_same_v<T, at::Tensor> || std::is_arithmetic_v<T>;
template <typename T, typename = void>
inline constexpr bool HoldsTensors = std::is_same_v<T, at::Tensor>;

template <typename... Ts>
constexpr bool are_tensor_nests(Parts<Ts...> /*parts*/) {
  return (IsTensorNest<Ts> && ...);
}
template <typename... Ts>
constexpr bool hold_tensors(Parts<Ts...> /*parts*/) {
  return (HoldsTensors<Ts> || ...);
}

// A tensor, or vectors, arrays, maps (their values), pairs, tuples and
// optionals of such; numbers may be in between.
template <typename T>
inline constexpr bool IsTensorNest<T, std::void_t<typename PartsOf<T>::Type>> =
    are_tensor_nests(typename PartsOf<T>::Type{});

// Whether there are tensors in such a nest, whatever else is in it.
template <typename T>
inline constexpr bool HoldsTensors<T, std::void_t<typename PartsOf<T>::Type>> =
    hold_tensors(typename PartsOf<T>::Type{});

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
