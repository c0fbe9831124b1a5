#include "brigade/reducer/unused_parameter_search.h"

#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace brigade {
namespace {

std::vector<GraphSearch::Root> roots_of(std::span<const at::Tensor> outputs) {
  std::vector<GraphSearch::Root> roots;
  roots.reserve(outputs.size());
  for (const at::Tensor& output : outputs) {
    if (!output.defined() || !output.requires_grad()) continue;
    roots.push_back(torch::autograd::impl::gradient_edge(output).function);
  }
  return roots;
}

}  // namespace

UnusedParameterSearch::UnusedParameterSearch(
    std::span<torch::autograd::Node* const> accumulators, bool always)
    : search_(accumulators), always_(always) {}

UnusedPrediction UnusedParameterSearch::predict(
    std::span<const at::Tensor> outputs) {
  UnusedPrediction prediction{.unused = {}, .roots = roots_of(outputs)};
  if (always_ || !all_were_used_) complete(prediction);
  return prediction;
}

void UnusedParameterSearch::complete(UnusedPrediction& prediction) {
  if (prediction.searched) return;
  prediction.searched = true;
  const std::span<const size_t> unused = search_.unreached(prediction.roots);
  prediction.unused.assign(unused.begin(), unused.end());
  prediction.roots.clear();
  // Searches that were put off and never made would have found what the one
  // before them did: all parameters used.
  if (num_searches_++ > 0 && !search_.repeated()) static_ = false;
  all_were_used_ = unused.empty();
}

}  // namespace brigade
