// Finds the parameters that a backward can't reach.
//
// Walks the autograd graph from the outputs of a forward towards its leaves. A
// reached parameter may still get no gradient. A reentrant checkpoint hides its
// graph: parameters used only inside of one are unreached.
//
//   GraphSearch search(accumulators);
//   at::Tensor output = net->forward(input);
//   for (size_t parameter : search.unreached(std::array{output})) ...
//
// Each forward makes its nodes anew: no result can be reused without a walk.
//
// Thread safety: none. Backwards through the graph may run at the same time.

#ifndef BRIGADE_HOOKS_GRAPH_SEARCH_H_
#define BRIGADE_HOOKS_GRAPH_SEARCH_H_

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <cstddef>
#include <span>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"

namespace brigade {

class GraphSearch {
 public:
  // `accumulators`: the gradient accumulator of each parameter, for instance
  // GradientHooks::accumulators(). REQUIRES: they outlive this object.
  //
  // Errors: ValueError if one is null or listed twice.
  explicit GraphSearch(std::span<torch::autograd::Node* const> accumulators);

  // Parameters that no path from `outputs` leads to, ascending, as indices in
  // the list given to the constructor. A parameter that is an output itself is
  // reached. Tensors without history are passed over.
  std::vector<size_t> unreached(std::span<const at::Tensor> outputs);

 private:
  void meet(torch::autograd::Node* node);

  // Of accumulators, known by their address: their memory is not touched.
  absl::flat_hash_map<const torch::autograd::Node*, size_t> numbers_;
  // Of the walk.
  absl::flat_hash_set<const torch::autograd::Node*> visited_;
  std::vector<torch::autograd::Node*> to_visit_;
  std::vector<bool> is_reached_;  // by parameter
  size_t num_unreached_ = 0;
};

}  // namespace brigade

#endif  // BRIGADE_HOOKS_GRAPH_SEARCH_H_
