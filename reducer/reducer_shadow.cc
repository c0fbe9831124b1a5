// An iteration to which this rank has nothing to contribute: its peers have
// data, and wait for its share of each collective.

#include <c10/util/ScopeExit.h>

#include "brigade/reducer/reducer.h"

namespace brigade {

void Reducer::shadow_iteration() try {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto tell_hook_of_the_end =
      c10::make_scope_exit([listener = hook_.listener] {
        if (listener) listener->iteration_begins(/*has_data=*/true);
      });
  end_unfinished_iteration();
  start_iteration();
  phase_ = Phase::kShadowing;
  observations_.begun = iteration_->iteration;
  // Marks belong to gradients of earlier backwards, which do not travel.
  if (graph_.used) graph_.used->clear_marks();
  try {
    if (skips_unused_buckets()) {
      begin_with_peers();
      launch_ready();  // the map
      await_used_map();
    }
    if (hook_.listener) hook_.listener->iteration_begins(/*has_data=*/false);
    for (const std::vector<size_t>& bucket : bound_.plan.buckets()) {
      for (const size_t parameter : bucket) {
        graph_.ready_order.note(parameter);
      }
    }
    iteration_->order.mark_all();
    launch_ready();
  } catch (...) {
    failed(std::current_exception());
    abort_iteration();
    throw;
  }
  finalize();
} catch (...) {
  observations_.note_error();
  throw;
}

}  // namespace brigade
