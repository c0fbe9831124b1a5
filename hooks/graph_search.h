// Finds the parameters that a backward can't reach.
//
// Walks the autograd graph from the outputs of a forward towards its leaves,
// without recursion. What is reached may still get no gradient: an output may
// be left out of the loss, a function may return an undefined gradient. A
// reentrant checkpoint (torch.utils.checkpoint's) hides its graph until
// backward runs it again: parameters used only inside of one are unreached.
//
//   GraphSearch search(accumulators);
//   at::Tensor output = net->forward(input);
//   for (size_t parameter : search.unreached(std::array{output})) ...
//
// Each call walks, 0.03-0.1 us per parameter. Nodes are made anew by each
// forward, and graphs that took another parameter may be alike in all else: a
// result can't be reused for a graph that seems to be the last one again.
//
// Thread safety: none. Backwards through the graph may run at the same time.

#ifndef BRIGADE_HOOKS_GRAPH_SEARCH_H_
#define BRIGADE_HOOKS_GRAPH_SEARCH_H_

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace brigade {

class GraphSearch {
 public:
  // `accumulators`: the gradient accumulator of each parameter, for instance
  // GradientHooks::accumulators(). They are known by their address.
  //
  // REQUIRES: they outlive this object.
  //
  // Errors: ValueError if one is null or listed twice.
  explicit GraphSearch(std::span<torch::autograd::Node* const> accumulators);
  ~GraphSearch();

  // Parameters that no path from `outputs` leads to, ascending, as indices in
  // the list given to the constructor. A parameter that is an output itself is
  // reached. Tensors without history are passed over. Valid until the next
  // call.
  std::span<const size_t> unreached(std::span<const at::Tensor> outputs);

  // True if the last call's result equals that of the call before it; false
  // after the first.
  bool repeated() const { return repeated_; }

 private:
  class NodeMarks;

  // These return whether all parameters have been reached.
  bool meet(torch::autograd::Node* node);
  bool walk();

  const std::unique_ptr<NodeMarks> marks_;
  std::vector<uint32_t> reached_in_walk_;  // by parameter: the last such walk
  size_t num_unreached_ = 0;
  std::vector<torch::autograd::Node*> to_visit_;
  std::vector<size_t> unreached_;
  std::vector<size_t> unreached_before_;
  bool searched_ = false;
  bool repeated_ = false;
};

}  // namespace brigade

#endif  // BRIGADE_HOOKS_GRAPH_SEARCH_H_
