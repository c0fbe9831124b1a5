#include "brigade/reducer/graph_history.h"

namespace brigade {
namespace {

// Until buckets are rebuilt; 0: never.
int64_t observed_iterations(const ReducerOptions& options) {
  const bool wants_rebuild = options.rebuild_buckets.value_or(
      options.bucket_plan.empty() &&
      (options.static_graph || !options.find_unused_parameters));
  return wants_rebuild ? options.rebuild_after_iterations : 0;
}

}  // namespace

GraphHistory::GraphHistory(const ReducerOptions& options,
                           const ParameterTable& table,
                           const GradientHooks& hooks,
                           c10d::ProcessGroup& group)
    : ready_order(observed_iterations(options)) {
  auto turn = UsedParameters::Turn::kLast;
  if (options.static_graph) {
    hook_counts.emplace(table.num_variables());
  } else if (options.find_unused_parameters) {
    unused_search.emplace(hooks.accumulators());
    if (options.skip_all_reduce_unused_parameters) {
      turn = UsedParameters::Turn::kFirst;
    }
  } else {
    return;
  }
  used.emplace(table, group, turn);
}

}  // namespace brigade
