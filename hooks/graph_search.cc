#include "brigade/hooks/graph_search.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/variable.h>

#include "brigade/hooks/autograd_node.h"

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
                      ", got null.\nGive only leaves that require a gradient.");
    TORCH_CHECK_VALUE(
        numbers_.emplace(accumulators[i], i).second,
        "GraphSearch: expected one gradient accumulator per parameter, got "
        "that of parameter ",
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
    // An accumulator made here would be none of ours.
    const NodePtr root =
        output.grad_fn()
            ? output.grad_fn()
            : torch::autograd::impl::try_get_grad_accumulator(output);
    if (root) meet(root.get());
    while (!to_visit_.empty() && num_unreached_ > 0) {
      const Node* const node = to_visit_.back();
      to_visit_.pop_back();
      for (const Edge& edge : node->next_edges()) {
        if (edge.function) meet(edge.function.get());
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

void GraphSearch::meet(Node* node) {
  const auto number = numbers_.find(node);
  if (number == numbers_.end()) {
    if (!visited_.insert(node).second) return;
    __builtin_prefetch(&node->next_edges());
    to_visit_.push_back(node);
  } else if (!is_reached_[number->second]) {
    is_reached_[number->second] = true;
    --num_unreached_;
  }
}

}  // namespace brigade
