#include "brigade/reducer/unused_parameter_search.h"

namespace brigade {

UnusedParameterSearch::UnusedParameterSearch(
    std::span<torch::autograd::Node* const> accumulators)
    : search_(accumulators), num_variables_(accumulators.size()) {}

UnusedPrediction UnusedParameterSearch::predict(
    std::span<const at::Tensor> outputs) {
  const std::span<const size_t> unused = search_.unreached(outputs);
  if (num_searches_++ > 0 && !search_.repeated()) static_ = false;
  return {.unused = {unused.begin(), unused.end()},
          .none_reached = unused.size() == num_variables_};
}

}  // namespace brigade
