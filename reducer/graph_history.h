// What earlier iterations told of the autograd graph.
//
// Thread safety: none; the reducer's lock covers it.

#ifndef BRIGADE_REDUCER_GRAPH_HISTORY_H_
#define BRIGADE_REDUCER_GRAPH_HISTORY_H_

#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "brigade/hooks/gradient_hooks.h"
#include "brigade/reducer/hook_counts.h"
#include "brigade/reducer/parameter_table.h"
#include "brigade/reducer/ready_order.h"
#include "brigade/reducer/reducer_options.h"
#include "brigade/reducer/unused_parameter_search.h"
#include "brigade/reducer/used_parameters.h"

namespace brigade {

struct GraphHistory {
  GraphHistory(const ReducerOptions& options, const ParameterTable& table,
               const GradientHooks& hooks, c10d::ProcessGroup& group);
  GraphHistory(const GraphHistory&) = delete;
  GraphHistory& operator=(const GraphHistory&) = delete;

  // A static graph needs no search; what ranks used is summed once.
  ReadyOrder ready_order;
  std::optional<UnusedParameterSearch> unused_search;  // if it may change
  std::optional<HookCounts> hook_counts;               // if it is static
  std::optional<UsedParameters> used;                  // in both cases
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_GRAPH_HISTORY_H_
