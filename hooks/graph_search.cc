#include "brigade/hooks/graph_search.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/variable.h>

#include "brigade/hooks/autograd_hooks.h"

namespace brigade {

using torch::autograd::Edge;
using torch::autograd::Node;

GraphSearch::GraphSearch(std::span<Node* const> accumulators)
    : is_reached_(accumulators.size()) {
  for (size_t i = 0; i < accumulators.size(); ++i) {
    TORCH_CHECK_VALUE(accumulators[i],
                      "GraphSearch: expected the gradient accumulator of "
                      "parameter ",
                      i,
                      ", got null.\nPass only leaves that require a gradient.");
    TORCH_CHECK_VALUE(
        parameters_.emplace(accumulators[i], i).second,
        "GraphSearch: expected one gradient accumulator per parameter, got "
        "the one of parameter ",
        i, " twice.\nList a shared parameter once.");
  }
}

std::vector<size_t> GraphSearch::unreached(
    std::span<const at::Tensor> outputs) {
  const size_t num_visited = visited_.size();
  visited_.clear();
  visited_.reserve(num_visited);
  is_reached_.assign(is_reached_.size(), false);
  num_unreached_ = is_reached_.size();
  for (const at::Tensor& output : outputs) {
    if (!output.defined()) continue;
    // Does not create an accumulator: a new one belongs to no parameter.
    const NodePtr root =
        output.grad_fn()
            ? output.grad_fn()
            : torch::autograd::impl::try_get_grad_accumulator(output);
    if (root) visit(root.get());
    while (!to_visit_.empty() && num_unreached_ > 0) {
      const Node* const node = to_visit_.back();
      to_visit_.pop_back();
      for (const Edge& edge : node->next_edges()) {
        if (edge.function) visit(edge.function.get());
      }
    }
  }
  to_visit_.clear();
  std::vector<size_t> unreached;
  if (num_unreached_ == 0) return unreached;
  for (size_t i = 0; i < is_reached_.size(); ++i) {
    if (!is_reached_[i]) unreached.push_back(i);
  }
  return unreached;
}

void GraphSearch::visit(Node* node) {
  const auto found = parameters_.find(node);
  if (found == parameters_.end()) {
    if (!visited_.insert(node).second) return;
    __builtin_prefetch(&node->next_edges());
    to_visit_.push_back(node);
  } else if (!is_reached_[found->second]) {
    is_reached_[found->second] = true;
    --num_unreached_;
  }
}

}  // namespace brigade
