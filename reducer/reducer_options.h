// Options of a Reducer.

#ifndef BRIGADE_REDUCER_REDUCER_OPTIONS_H_
#define BRIGADE_REDUCER_REDUCER_OPTIONS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <vector>

#include "brigade/planning/bucket_plan.h"

namespace brigade {

// Ranks compare them at construction, and raise where they differ; but for
// one_backward_per_forward and gradient_as_bucket_view, which need not be
// equal, and verify_across_ranks, which must be.
struct ReducerOptions {
  // Sizes in bytes at which buckets close, for each dtype and device: of the
  // first bucket, the second, ...; the last one repeats. A bucket's last
  // parameter may exceed its cap.
  std::vector<int64_t> bucket_caps_bytes = {kDefaultBucketCapsBytes.begin(),
                                            kDefaultBucketCapsBytes.end()};

  // Parameter indices by bucket, in launch order. Empty: planned by size, in
  // reverse registration order; and once more, from the order in which
  // gradients became ready on rank 0 in the first iteration (the second of a
  // static graph), unless find_unused_parameters is set without static_graph.
  std::vector<std::vector<size_t>> bucket_plan = {};

  // One per parameter, for error messages. Empty: errors give indices only.
  std::vector<std::string> parameter_names = {};

  // One per parameter: its gradient is a sparse COO tensor, which is reduced in
  // a bucket of its own. Empty: all are dense.
  std::vector<bool> expect_sparse_gradients = {};

  // A backward may leave parameters out: those that the graph of the outputs
  // does not reach, or that get undefined gradients, count as zero. A parameter
  // that no rank used keeps its gradient. Costs a walk of the graph per forward
  // and an all-reduce of 4 bytes per parameter per iteration.
  bool find_unused_parameters = false;

  // With find_unused_parameters: leaves out the collectives of buckets that no
  // rank used. Backward then begins with a blocking all-reduce of 4 bytes per
  // parameter. A parameter that the graph reaches counts as used.
  bool skip_all_reduce_unused_parameters = false;

  // Each iteration uses the same parameters the same number of times, as
  // reentrant checkpoints need. The first iteration counts how often each
  // gradient hook runs, and is reduced when its backward ends. Parameters may
  // be unused; the two options above have no effect.
  bool static_graph = false;

  // A backward that brings some gradients of an iteration but not all is an
  // error when it ends. If false, a later backward may bring the others; the
  // next prepare_for_backward() names those that are missing.
  bool one_backward_per_forward = false;

  // Gradients are views of their bucket, and are not copied back. If false,
  // the tensors in `.grad` stay, and buckets take memory on top of theirs;
  // large ones on the CPU get their bucket's memory instead
  // (buffer_donation.h).
  bool gradient_as_bucket_view = true;

  // Compares parameters and options across ranks at construction. If false,
  // construction communicates nothing, and ranks compare their buckets in the
  // first prepare_for_backward().
  bool verify_across_ranks = true;

  // Where all buckets are on devices: the number of iterations, 0 to 32, that
  // may be delivered before all ranks are known to have ended them, when the
  // next one begins. A rank's failure is reported to the others that many
  // iterations later at most; the group is closed then, and training resumes
  // from a checkpoint. On the CPU ranks always wait before delivery.
  int max_unconfirmed_iterations = 1;

  // Null: averages by all-reduce in the gradients' dtype; on the CPU, with Gloo
  // and all ranks on one host, through shared memory in rank order
  // (comm/ordered/host_sums.h). all_reduce_hook(group) leaves it to the group.
  // A hook gets complex gradients as pairs of reals, with a last dimension
  // of 2.
  std::shared_ptr<c10d::CommHookInterface> comm_hook = nullptr;

  // Adds gradients in rank order and divides the sum, so that bits depend on
  // the ranks' gradients alone, and equal those of sharded training without
  // replicas. Adds float16 and bfloat16 in float32. For dense gradients,
  // without a comm hook that does not sum in order. CPU tensors travel through
  // shared memory on one host, otherwise by the group's all-to-all and
  // all-gather (comm_hooks/averaging_hook.h).
  bool reproducible = false;
};

// True if buckets are planned once more.
inline bool rebuilds_buckets(const ReducerOptions& options) {
  return options.bucket_plan.empty() &&
         (options.static_graph || !options.find_unused_parameters);
}

}  // namespace brigade

#endif  // BRIGADE_REDUCER_REDUCER_OPTIONS_H_
