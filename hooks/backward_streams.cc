#include "brigade/hooks/backward_streams.h"

#include <algorithm>
#include <cstddef>

namespace brigade {

using torch::autograd::Edge;
using torch::autograd::Node;

std::span<const c10::Stream> BackwardStreams::of(
    std::span<const WeakNodePtr> ends, uint64_t first_node) {
  marks_.begin_walk();
  streams_.clear();
  for (const WeakNodePtr& end : ends) {
    const NodePtr held = end.lock();
    if (!held) continue;
    meet(held.get(), first_node);
    while (!to_visit_.empty()) {
      Node* node = to_visit_.back();
      to_visit_.pop_back();
      note_stream_of(*node);
      for (const Edge& edge : node->next_edges()) {
        if (edge.function) meet(edge.function.get(), first_node);
      }
    }
  }
  return streams_;
}

// Accumulators of gradients, which are older than all, have the newest number.
void BackwardStreams::meet(Node* node, uint64_t first_node) {
  const bool is_within =
      node->sequence_nr() >= first_node && node->num_outputs() > 0;
  if (is_within && marks_.meet(node) == NodeMarks::kNew) {
    to_visit_.push_back(node);
  }
}

// As autograd chooses it.
void BackwardStreams::note_stream_of(Node& node) {
  for (uint32_t i = 0; i < node.num_inputs(); ++i) {
    const torch::autograd::InputMetadata& input = node.input_metadata(i);
    if (input.device().type() != type_) continue;
    const c10::Stream stream = input.stream();
    if (std::ranges::find(streams_, stream) == streams_.end()) {
      streams_.push_back(stream);
    }
    return;
  }
}

}  // namespace brigade
