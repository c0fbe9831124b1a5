// Predicts, after a forward, which parameters its backward will not reach.
//
// The graph of every forward is searched from the outputs
// (hooks/graph_search.h), so that buckets need not wait for gradients that will
// not come. A search that is left out while all parameters are used would make
// the place of a launch depend on what this rank saw before, and a rank that
// then leaves a parameter out would launch later than its peers.
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_REDUCER_UNUSED_PARAMETER_SEARCH_H_
#define BRIGADE_REDUCER_UNUSED_PARAMETER_SEARCH_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "brigade/hooks/graph_search.h"

namespace brigade {

// What is known of one forward. Variables go by their number, replica by
// replica.
struct UnusedPrediction {
  std::vector<size_t> unused;  // ascending
  bool none_reached = false;   // the graph shows no parameter
};

class UnusedParameterSearch {
 public:
  // `accumulators` outlive this object.
  explicit UnusedParameterSearch(
      std::span<torch::autograd::Node* const> accumulators);

  UnusedPrediction predict(std::span<const at::Tensor> outputs);

  // True while the same parameters were unused in all iterations.
  bool is_static() const { return static_; }

  // Walks of the graph so far.
  int64_t num_searches() const { return num_searches_; }

 private:
  GraphSearch search_;
  const size_t num_variables_;
  bool static_ = true;
  int64_t num_searches_ = 0;
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_UNUSED_PARAMETER_SEARCH_H_
