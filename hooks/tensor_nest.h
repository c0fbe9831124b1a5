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

// Calls `visit(at::Tensor&)` for each tensor, undefined ones too.
template <typename T, typename Visit>
void for_each_tensor(T& nest, const Visit& visit) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    visit(nest);
  } else if constexpr (std::is_arithmetic_v<T>) {
  } else if constexpr (requires { nest.has_value(); }) {
    if (nest.has_value()) for_each_tensor(*nest, visit);
  } else if constexpr (requires { typename T::mapped_type; }) {
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
