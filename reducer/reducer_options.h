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

// Ranks compare these at construction, and throw if they differ.
// one_backward_per_forward and gradient_as_bucket_view may differ.
// verify_across_ranks is not compared, but must be equal.
struct ReducerOptions {
  // Sizes in bytes at which the first bucket closes, the second, ..., for each
  // dtype and device. The last one repeats. A bucket's last parameter may
  // exceed its cap.
  std::vector<int64_t> bucket_cap_bytes = {kDefaultBucketCapsBytes.begin(),
                                           kDefaultBucketCapsBytes.end()};

  // Parameter indices by bucket, in launch order. Empty: planned by size in
  // reverse registration order, and rebuilt once. The rebuild uses the order in
  // which gradients became ready on rank 0 in the first iteration (the second
  // of a static graph). No rebuild with find_unused_parameters alone.
  std::vector<std::vector<size_t>> bucket_plan = {};

  // One per parameter, for error messages. Empty: messages have indices only.
  std::vector<std::string> parameter_names = {};

  // One per parameter: true for a sparse COO gradient, which has a bucket to
  // itself. Empty: all are dense.
  std::vector<bool> expect_sparse_gradients = {};

  // Allows unused parameters: those that the graph of the outputs does not
  // reach, and those with undefined gradients. They contribute zeros. A
  // parameter that no rank used keeps its gradient. Costs a graph search per
  // forward and an all-reduce of 4 bytes per parameter per iteration.
  bool find_unused_parameters = false;

  // With find_unused_parameters: skips the collectives of buckets that no rank
  // used. Backward then begins with a blocking all-reduce of 4 bytes per
  // parameter. A parameter that the graph reaches counts as used.
  bool skip_all_reduce_unused_parameters = false;

  // Declares that each iteration uses the same parameters the same number of
  // times. Needed for reentrant checkpoints. The first iteration is reduced
  // when its backward ends. Allows unused parameters; the two options above
  // have no effect.
  bool static_graph = false;

  // If true, a backward that ends without some of the iteration's gradients
  // throws. If false, a later backward may bring the others, and the next
  // prepare_for_backward() throws if some are still missing.
  bool one_backward_per_forward = false;

  // If true, gradients are views of their bucket, and are not copied back. If
  // false, the tensors in `.grad` are kept, and buckets have memory of their
  // own, unless a large CPU gradient takes over its bucket's.
  bool gradient_as_bucket_view = true;

  // Compares parameters and options across ranks at construction. If false,
  // construction does not communicate, and the first prepare_for_backward()
  // compares the buckets.
  bool verify_across_ranks = true;

  // With all buckets on devices: the number of iterations, 0 to 32, whose
  // statuses may still be missing when the next iteration begins. A rank's
  // failure reaches the others after at most that many further ones. Then the
  // group is closed, and training resumes from a checkpoint. On the CPU
  // statuses are awaited before delivery.
  int max_unconfirmed_iterations = 1;

  // Null: averages by all-reduce in the gradients' dtype. On the CPU, with Gloo
  // and all ranks on one host, that sums through shared memory in rank order;
  // all_reduce_hook(group) uses the group instead. A hook gets complex
  // gradients as pairs of reals, with a last dimension of 2.
  std::shared_ptr<c10d::CommHookInterface> comm_hook = nullptr;

  // Adds gradients in rank order and divides the sum. The bits depend on the
  // ranks' gradients alone, and equal those of sharded training without
  // replicas. Adds float16 and bfloat16 in float32. For dense gradients, and
  // comm hooks that sum in rank order. CPU tensors go through shared memory on
  // one host, otherwise by the group's all-to-all and all-gather.
  bool reproducible = false;
};

// Returns true if the bucket plan is rebuilt once.
inline bool rebuilds_buckets(const ReducerOptions& options) {
  return options.bucket_plan.empty() &&
         (options.static_graph || !options.find_unused_parameters);
}

}  // namespace brigade

#endif  // BRIGADE_REDUCER_REDUCER_OPTIONS_H_
