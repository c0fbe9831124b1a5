// Search for unused parameters: walks the autograd graph from the outputs of a
// forward to its leaves.
//
//   GraphSearch search(accumulators);
//   at::Tensor output = net->forward(input);
//   for (size_t parameter : search.unreached(std::array{output})) ...
//
// A reached parameter may still get no gradient. The graph inside a reentrant
// checkpoint is invisible: parameters used only there count as unreached.
// Every forward creates new nodes, so each one needs a new walk.
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
  // `accumulators`: one gradient accumulator per parameter, as returned by
  // GradientHooks::accumulators(). REQUIRES: they outlive this object.
  //
  // Errors: ValueError if one is null or listed twice.
  explicit GraphSearch(std::span<torch::autograd::Node* const> accumulators);

  // Returns the ascending indices, in the constructor's list, of the parameters
  // that no path from `outputs` reaches. A parameter that is an output itself
  // is reached. Ignores tensors without history.
  std::vector<size_t> unreached(std::span<const at::Tensor> outputs);

 private:
  void visit(torch::autograd::Node* node);

  // Parameter index by accumulator; accumulators are never read.
  absl::flat_hash_map<const torch::autograd::Node*, size_t> parameters_;
  // State of one walk.
  absl::flat_hash_set<const torch::autograd::Node*> visited_;
  std::vector<torch::autograd::Node*> to_visit_;
  std::vector<bool> is_reached_;  // by parameter
  size_t num_unreached_ = 0;
};

}  // namespace brigade

#endif  // BRIGADE_HOOKS_GRAPH_SEARCH_H_
