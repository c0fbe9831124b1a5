#include "brigade/reducer/graph_history.h"

namespace brigade {
namespace {

bool wants_rebuild(const ReducerOptions& options) {
  return options.rebuild_buckets.value_or(
      options.bucket_plan.empty() &&
      (options.static_graph || !options.find_unused_parameters));
}

}  // namespace

GraphHistory::GraphHistory(const ReducerOptions& options,
                           const ParameterTable& table,
                           const GradientHooks& hooks)
    : ready_order(wants_rebuild(options)) {
  if (options.static_graph) {
    firing_counts.emplace(table.num_variables());
  } else if (options.find_unused_parameters) {
    unused_search.emplace(hooks.accumulators(),
                          options.skip_all_reduce_unused_parameters);
  } else {
    return;
  }
  used_map.emplace(table.num_replicas(), table.size(), table[0].device());
}

}  // namespace brigade
