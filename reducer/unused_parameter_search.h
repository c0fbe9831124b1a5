// Predicts, after a forward, which parameters its backward will not reach.
//
// The graph is searched from the outputs (hooks/graph_search.h). While every
// search finds that all parameters are used, the next one is put off: it is
// made at the end of backward, and only if gradients are missing then. Once
// some parameter was unused, each forward is searched, so that buckets need not
// wait for gradients that will not come.
//
// Thread safety: none; the reducer's lock covers it.

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
  std::vector<size_t> unused;            // ascending; empty until searched
  std::vector<GraphSearch::Root> roots;  // keep the graph until it is searched
  bool searched = false;
  bool none_reached = false;  // of an unknown graph: it shows no parameter
};

class UnusedParameterSearch {
 public:
  // `always`: never put the search off. `accumulators` outlive this object.
  UnusedParameterSearch(std::span<torch::autograd::Node* const> accumulators,
                        bool always);

  UnusedPrediction predict(std::span<const at::Tensor> outputs);

  // Searches, unless that has been done.
  void complete(UnusedPrediction& prediction);

  // True while the same parameters were unused in all iterations.
  bool is_static() const { return static_; }

  // Walks of the graph so far.
  int64_t num_searches() const { return num_searches_; }

 private:
  GraphSearch search_;
  const bool always_;
  bool all_were_used_ = false;
  bool static_ = true;
  int64_t num_searches_ = 0;
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_UNUSED_PARAMETER_SEARCH_H_
