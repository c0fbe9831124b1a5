#include "brigade/comm/ordered/ordered_sum.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>
#include <c10/util/complex.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <type_traits>
#include <vector>

namespace brigade {
namespace {

constexpr int64_t kBlock = 1024;  // elements that fit into the cache

// The type in which T is summed: unsigned for integers, because signed overflow
// is undefined; wider for float16, so that it is rounded once.
template <typename T, typename = void>
struct Accumulated {
  using Type = at::opmath_type<T>;
};
template <typename T>
struct Accumulated<T, std::enable_if_t<std::is_integral_v<T>>> {
  using Type = std::make_unsigned_t<T>;
};

template <typename T>
void add_blocks(const std::vector<const T*>& terms, std::optional<double> scale,
                int64_t numel, T* out) {
  using Sum = typename Accumulated<T>::Type;
  using Real = typename c10::scalar_value_type<Sum>::type;
  std::array<Sum, kBlock> total;
  for (int64_t begin = 0; begin < numel; begin += kBlock) {
    const int64_t length = std::min(kBlock, numel - begin);
    for (int64_t i = 0; i < length; ++i) {
      total[i] = static_cast<Sum>(terms.front()[begin + i]);
    }
    for (size_t t = 1; t < terms.size(); ++t) {
      const T* const term = terms[t] + begin;
      for (int64_t i = 0; i < length; ++i) {
        total[i] = static_cast<Sum>(total[i] + static_cast<Sum>(term[i]));
      }
    }
    if constexpr (!std::is_integral_v<T>) {
      if (scale) {
        const Real factor = static_cast<Real>(*scale);
        for (int64_t i = 0; i < length; ++i) total[i] *= factor;
      }
    }
    for (int64_t i = 0; i < length; ++i) {
      out[begin + i] = static_cast<T>(total[i]);
    }
  }
}

}  // namespace

void ordered_sum(std::span<const at::Tensor> terms, std::optional<double> scale,
                 const at::Tensor& out) {
  TORCH_INTERNAL_ASSERT(!terms.empty());
  AT_DISPATCH_ALL_TYPES_AND_COMPLEX_AND2(
      at::kHalf, at::kBFloat16, out.scalar_type(), "ordered_sum", [&] {
        std::vector<const scalar_t*> pointers;
        for (const at::Tensor& term : terms) {
          TORCH_INTERNAL_ASSERT(term.numel() == out.numel());
          pointers.push_back(term.const_data_ptr<scalar_t>());
        }
        add_blocks(pointers, scale, out.numel(), out.data_ptr<scalar_t>());
      });
}

at::Tensor empty_sum(int64_t numel, const at::Tensor& like) {
  const at::ScalarType dtype = like.scalar_type();
  const bool is_short = dtype == at::kHalf || dtype == at::kBFloat16;
  return at::empty({numel},
                   like.options().dtype(is_short ? at::kFloat : dtype));
}

void sum_in_order(const at::Tensor& terms, int count, const at::Tensor& sum) {
  const int64_t numel = sum.numel();
  sum.copy_(terms.narrow(0, 0, numel));
  for (int i = 1; i < count; ++i) sum.add_(terms.narrow(0, i * numel, numel));
}

}  // namespace brigade
