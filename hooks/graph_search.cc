#include "brigade/hooks/graph_search.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

namespace brigade {

using torch::autograd::Edge;
using torch::autograd::Node;

GraphSearch::GraphSearch(std::span<Node* const> accumulators)
    : reached_in_walk_(accumulators.size(), 0) {
  TORCH_CHECK_VALUE(accumulators.size() < NodeMarks::kVisited,
                    "GraphSearch: expected fewer than ", NodeMarks::kVisited,
                    " parameters, got ", accumulators.size(),
                    ".\nSearch for some of them at a time.");
  for (size_t i = 0; i < accumulators.size(); ++i) {
    TORCH_CHECK_VALUE(accumulators[i],
                      "GraphSearch: expected the gradient accumulator of "
                      "parameter ",
                      i,
                      ", got null.\nGive only leaves that require a gradient.");
    TORCH_CHECK_VALUE(
        marks_.number(accumulators[i], static_cast<uint32_t>(i)),
        "GraphSearch: expected one gradient accumulator per parameter, got "
        "that of parameter ",
        i, " twice.\nList a shared parameter once.");
  }
}

std::span<const size_t> GraphSearch::unreached(
    std::span<const at::Tensor> outputs) {
  start();
  bool all_reached = num_unreached_ == 0;
  for (const at::Tensor& output : outputs) {
    if (all_reached) break;
    if (!output.defined()) continue;
    if (const Root& root = output.grad_fn()) {
      all_reached = meet(root.get()) || walk();
    } else if (const Root leaf =
                   torch::autograd::impl::try_get_grad_accumulator(output)) {
      // Made here, it would be none of ours, and its address not its own.
      all_reached = meet(leaf.get()) || walk();
    }
  }
  return finish(all_reached);
}

std::span<const size_t> GraphSearch::unreached(std::span<const Root> roots) {
  start();
  bool all_reached = num_unreached_ == 0;
  for (const Root& root : roots) {
    if (all_reached) break;
    if (root) all_reached = meet(root.get()) || walk();
  }
  return finish(all_reached);
}

void GraphSearch::start() {
  marks_.begin_walk();
  if (marks_.walk() == 1) {
    std::fill(reached_in_walk_.begin(), reached_in_walk_.end(), 0);
  }
  num_unreached_ = reached_in_walk_.size();
  to_visit_.clear();
}

// Accumulators are known by their address: their memory is not touched.
inline bool GraphSearch::meet(Node* node) {
  const uint32_t number = marks_.meet(node);
  if (number == NodeMarks::kVisited) return false;
  if (number == NodeMarks::kNew) {
    __builtin_prefetch(&node->next_edges());
    to_visit_.push_back(node);
    return false;
  }
  uint32_t& reached = reached_in_walk_[number];
  if (reached == marks_.walk()) return false;
  reached = marks_.walk();
  return --num_unreached_ == 0;
}

bool GraphSearch::walk() {
  while (!to_visit_.empty()) {
    Node* node = to_visit_.back();
    to_visit_.pop_back();
    for (const Edge& edge : node->next_edges()) {
      if (edge.function && meet(edge.function.get())) return true;
    }
  }
  return false;
}

std::span<const size_t> GraphSearch::finish(bool all_reached) {
  unreached_.swap(unreached_before_);
  unreached_.clear();
  if (!all_reached) {
    for (size_t i = 0; i < reached_in_walk_.size(); ++i) {
      if (reached_in_walk_[i] != marks_.walk()) unreached_.push_back(i);
    }
  }
  repeated_ = searched_ && unreached_ == unreached_before_;
  searched_ = true;
  return unreached_;
}

}  // namespace brigade
