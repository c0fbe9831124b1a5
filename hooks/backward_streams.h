// Finds the streams on which a backward computes a part of a graph: each node
// on the stream that it was recorded on.
//
// To know: a walk takes time for each node of the part (the benchmark
// graph_search says how much).
//
// Thread safety: none. A backward through the graph may be under way.

#ifndef BRIGADE_HOOKS_BACKWARD_STREAMS_H_
#define BRIGADE_HOOKS_BACKWARD_STREAMS_H_

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <span>
#include <vector>

#include "brigade/hooks/autograd_node.h"
#include "brigade/hooks/node_marks.h"

namespace brigade {

// Which nodes the calling thread records from here on.
struct RecordedSince {
  static RecordedSince now();

  // Those of other threads always are: who records a part of a graph may have
  // others help.
  bool holds(torch::autograd::Node& node) const {
    return node.thread_id() != thread_id || node.sequence_nr() >= first_node;
  }

  uint64_t thread_id = 0;
  uint64_t first_node = 0;  // by autograd's numbers (ATen/SequenceNumber.h)
};

class BackwardStreams {
 public:
  // Streams of this device.
  explicit BackwardStreams(c10::Device device) : device_(device) {}

  // Distinct, of all nodes of the part that are reached from `ends`; valid
  // until the next call. Ends that are gone are passed over.
  std::span<const c10::Stream> of(std::span<const WeakNodePtr> ends,
                                  const RecordedSince& part);

 private:
  void meet(torch::autograd::Node* node, const RecordedSince& part);
  void note_stream_of(torch::autograd::Node& node);

  const c10::Device device_;
  NodeMarks marks_;
  std::vector<torch::autograd::Node*> to_visit_;
  std::vector<c10::Stream> streams_;
};

}  // namespace brigade

#endif  // BRIGADE_HOOKS_BACKWARD_STREAMS_H_
