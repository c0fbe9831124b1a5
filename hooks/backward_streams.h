// Finds the streams on which a backward computes a part of a graph: each node
// on the stream that it was recorded on.
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

class BackwardStreams {
 public:
  // Streams of devices of this type.
  explicit BackwardStreams(c10::DeviceType type) : type_(type) {}

  // Distinct, of all nodes that the backward comes to from `ends`, as far as
  // they are not older than `first_node`, a sequence number of autograd's
  // (ATen/SequenceNumber.h); valid until the next call. Ends that are gone are
  // passed over.
  std::span<const c10::Stream> of(std::span<const WeakNodePtr> ends,
                                  uint64_t first_node);

 private:
  void meet(torch::autograd::Node* node, uint64_t first_node);
  void note_stream_of(torch::autograd::Node& node);

  const c10::DeviceType type_;
  NodeMarks marks_;
  std::vector<torch::autograd::Node*> to_visit_;
  std::vector<c10::Stream> streams_;
};

}  // namespace brigade

#endif  // BRIGADE_HOOKS_BACKWARD_STREAMS_H_
