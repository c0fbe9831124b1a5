#include "brigade/hooks/backward_streams.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>

#include <algorithm>

namespace brigade {

using torch::autograd::Edge;
using torch::autograd::Node;

RecordedSince RecordedSince::now() {
  return {.thread_id = at::RecordFunction::currentThreadId(),
          .first_node = at::sequence_number::peek()};
}

std::span<const c10::Stream> BackwardStreams::of(
    std::span<const WeakNodePtr> ends, const RecordedSince& part) {
  marks_.begin_walk();
  streams_.clear();
  for (const WeakNodePtr& end : ends) {
    const NodePtr held = end.lock();
    if (!held) continue;
    meet(held.get(), part);
    while (!to_visit_.empty()) {
      Node* node = to_visit_.back();
      to_visit_.pop_back();
      note_stream_of(*node);
      for (const Edge& edge : node->next_edges()) {
        if (edge.function) meet(edge.function.get(), part);
      }
    }
  }
  return streams_;
}

// Accumulators of gradients, which are older than all, have the newest number;
// nothing is behind them.
void BackwardStreams::meet(Node* node, const RecordedSince& part) {
  if (node->num_outputs() == 0 || !part.holds(*node)) return;
  if (marks_.meet(node) == NodeMarks::kNew) to_visit_.push_back(node);
}

// As autograd chooses it.
void BackwardStreams::note_stream_of(Node& node) {
  for (uint32_t i = 0; i < node.num_inputs(); ++i) {
    const torch::autograd::InputMetadata& input = node.input_metadata(i);
    if (input.device().type() != device_.type()) continue;
    const c10::Stream stream = input.stream();
    if (input.device() == device_ &&
        std::ranges::find(streams_, stream) == streams_.end()) {
      streams_.push_back(stream);
    }
    return;
  }
}

}  // namespace brigade
