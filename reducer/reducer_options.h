// Every knob of a Reducer, with its default and its price.

#ifndef BRIGADE_REDUCER_REDUCER_OPTIONS_H_
#define BRIGADE_REDUCER_REDUCER_OPTIONS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <vector>

#include "brigade/planning/bucket_plan.h"

namespace brigade {

// Compared across ranks at construction: number of local replicas, caps, plan,
// names, sparse flags, rebuild, unused parameters, static graph, reproducible
// and its row size, a built-in hook's wire dtype, the name of another one,
// max_unconfirmed_iterations.
// verify_across_ranks must be alike too, which nobody can compare; the rest may
// differ.
struct ReducerOptions {
  // Sizes at which buckets close, of gradients in the parameters' dtype, for
  // each dtype and device by itself: the first bucket of a kind to fill, the
  // second, ...; the last one repeats. A bucket closes when it reaches its cap,
  // which its last parameter may exceed. Small buckets start communication
  // early and pay latency often; one huge bucket hides nothing behind backward.
  std::vector<int64_t> bucket_caps_bytes = {kDefaultBucketCapsBytes.begin(),
                                            kDefaultBucketCapsBytes.end()};

  // Parameter indices by bucket, in launch order. Replaces planning by size at
  // the start. Empty: plan by size, in reverse registration order.
  std::vector<std::vector<size_t>> bucket_plan = {};

  // One per parameter, for error messages. Empty: errors give indices only.
  std::vector<std::string> parameter_names = {};

  // One per parameter: its gradient is a sparse COO tensor, which is reduced in
  // a bucket of its own. Empty: all are dense.
  std::vector<bool> expect_sparse_gradients = {};

  // Parameters may be left out of a backward: those that the graph of the
  // outputs does not reach, or backward only with undefined gradients, count as
  // zero, and a parameter that no rank used keeps its gradient as it was. Costs
  // a walk of the graph per forward while parameters are unused, and one
  // all-reduce of 4 bytes per parameter per iteration. Keeps the graph of the
  // last outputs until the next preparation if no backward goes through it.
  bool find_unused_parameters = false;

  // With find_unused_parameters, else without effect: leave out the collectives
  // of buckets that no rank used. Backward then begins with a blocking
  // all-reduce of 4 bytes per parameter, and every forward's graph is searched.
  // A parameter that the graph reaches counts as used, whatever gradient comes.
  bool skip_all_reduce_unused_parameters = false;

  // The same parameters are used equally often in every iteration, which is
  // what checkpointing with reentrant backwards needs. The first iteration
  // counts how often each gradient hook runs and is reduced when its backward
  // ends; later ones are held to that, at no cost per iteration. Unused
  // parameters may be among them: find_unused_parameters and
  // skip_all_reduce_unused_parameters have no effect beside this.
  bool static_graph = false;

  // A backward that brings some gradients of an iteration but not all is an
  // error when it ends, which names those that are missing. If false, a later
  // backward may bring them, and they are missed by the next
  // prepare_for_backward(). Need not be alike on all ranks.
  bool one_backward_per_forward = false;

  // Plan again, once, from the order in which gradients became ready on rank 0
  // in the first iteration, in the second of a static graph. Costs one
  // broadcast of 8 bytes per parameter and, if the plan changes, one allocation
  // of all buckets. Unset: unless a bucket_plan is given, or unused parameters
  // are searched for, whose order is that of one iteration only.
  std::optional<bool> rebuild_buckets = std::nullopt;

  // Gradients are views of their bucket: no copy back, and gradient memory is
  // that of the buckets plus the gradients of the bucket being filled. Each
  // step replaces the tensor in `.grad` that autograd put there. If false,
  // results go to the gradients autograd made, which keep their identity: as
  // copies, from buckets that are memory on top of theirs. On the CPU, where
  // real gradients travel in their own dtype to be averaged or summed, one of
  // 64 KiB or more that nobody else holds gets its place in the bucket instead
  // (buffer_donation.h).
  bool gradient_as_bucket_view = true;

  // Buckets have memory from the time when they are packed until gradients have
  // been delivered, so that theirs and that of forward's activations are needed
  // less at the same time. Gradients that are views keep it until they are set
  // to None. Costs an allocation per bucket and iteration, a new view per
  // gradient, and large gradients on the CPU are copied out.
  bool lazy_bucket_allocation = false;

  // Compare parameters and options across ranks at construction. Costs two
  // small collectives, and ranks connect to each other. If false, construction
  // communicates nothing; ranks connect, and those whose buckets differ raise,
  // in the first prepare_for_backward(). Set it alike on every rank: one that
  // compares waits for the others, at most for the group's timeout.
  bool verify_across_ranks = true;

  // Where all buckets are on devices: the number of iterations that may be
  // delivered before all ranks are known to have ended them, when the next one
  // begins. From 0 to 32. A rank that fails is reported to the others that many
  // iterations later at the latest. They have stepped with gradients in which
  // it counted as zero: the group is closed, and training resumes from a
  // checkpoint. On the CPU ranks always wait before gradients are delivered.
  int max_unconfirmed_iterations = 1;

  // How a bucket crosses ranks. Null: average by all-reduce in the gradients'
  // own dtype; of ranks that are all on one host (Gloo, CPU, compared at
  // construction) through memory that they share, up to 256 MiB a rank, by two
  // threads for each group (comm/ordered/host_sums.h). It adds in the order of
  // the ranks; all_reduce_hook(group) leaves it to the group. See comm_hooks/.
  // A hook gets complex gradients as pairs of reals: buffers of twice the
  // length, shapes with a last dimension of 2.
  std::shared_ptr<c10d::CommHookInterface> comm_hook = nullptr;

  // Gradients are added up in the order of the ranks and divided once, when the
  // sum is there, so that the bits of an average are a function of the ranks'
  // gradients: other caps, plans, rebuilds, orders of backward, views or
  // static graphs don't show, and sharded training (fsdp/) on as many ranks has
  // the same ones. float16 and bfloat16 are added in float32. Of dense
  // gradients, with no comm hook but one that sums in order. CPU tensors travel
  // through memory that the ranks of one host share; between hosts over
  // connections of their own, so the group must have a store, with a bucket's
  // memory for each bucket in flight. Device tensors travel by two collectives
  // of the group's backend (comm_hooks/ordered_all_reduce.h), with a bucket's
  // memory once more.
  bool reproducible = false;

  // With `reproducible`: ranks in rows of so many, each row's sum by itself and
  // then these, which is the order of sharded training over as many shards
  // (FullyShardOptions::num_shards). Divides the number of ranks. Unset: all.
  std::optional<int> reproducible_row_size = std::nullopt;
};

// What an unset `rebuild_buckets` means. `has_given_plan`: the user chose the
// first buckets. An order seen under a changing graph is that of one iteration
// only.
inline bool rebuilds_by_default(const ReducerOptions& options,
                                bool has_given_plan) {
  return !has_given_plan &&
         (options.static_graph || !options.find_unused_parameters);
}

}  // namespace brigade

#endif  // BRIGADE_REDUCER_REDUCER_OPTIONS_H_
