// torch's own reducer, to compare with.

#ifndef BRIGADE_TESTS_SUPPORT_TORCH_REDUCER_H_
#define BRIGADE_TESTS_SUPPORT_TORCH_REDUCER_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace brigade::testing {

// Leaves out the last argument where this torch's constructor has no such one.
template <typename TorchReducer, typename Last, typename... Arguments>
std::shared_ptr<TorchReducer> construct_with_last(Last last,
                                                  Arguments... others) {
  if constexpr (std::is_constructible_v<TorchReducer, Arguments..., Last>) {
    return std::make_shared<TorchReducer>(std::move(others)...,
                                          std::move(last));
  } else {
    return std::make_shared<TorchReducer>(std::move(others)...);
  }
}

// Gradients are views of these buckets.
inline std::shared_ptr<c10d::Reducer> make_torch_reducer(
    const std::vector<at::Tensor>& parameters,
    std::vector<std::vector<size_t>> bucket_plan,
    const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  return construct_with_last<c10d::Reducer>(
      /*bucket_bytes_cap_list=*/std::vector<int64_t>{}, parameters,
      std::move(bucket_plan), group,
      /*expect_sparse_gradients=*/std::vector<bool>(parameters.size()),
      int64_t{c10d::kDefaultBucketBytesCap}, /*find_unused_parameters=*/false,
      /*gradient_as_bucket_view=*/true,
      std::unordered_map<size_t, std::string>{},
      int64_t{c10d::kDefaultFirstBucketBytes},
      /*skip_all_reduce_unused_params=*/false, /*use_python_reducer=*/false);
}

}  // namespace brigade::testing

#endif  // BRIGADE_TESTS_SUPPORT_TORCH_REDUCER_H_
