// Averages gradients over the ranks of a group while backward is still running.
//
// A reducer watches the gradients of its parameters. When all gradients of a
// bucket are there, it packs them into one buffer and launches a collective on
// it; when backward returns, every `.grad` holds the average over all ranks.
// It does not know modules, optimizers or data: ddp/ wraps a module.
//
// Example:
//
//   Reducer reducer(parameters, group);
//   for (auto& [input, target] : batches) {
//     optimizer.zero_grad();
//     at::Tensor output = net->forward(input);
//     reducer.prepare_for_backward(output);
//     loss(output, target).backward();
//     optimizer.step();
//   }
//
// A backward without prepare_for_backward() before it accumulates gradients on
// this rank only; the next prepared one reduces the sum.
//
// docs/protocol.md tells what is launched when, and what happens when something
// fails.
//
// Thread safety: methods may be called from any thread, one at a time;
// gradients may arrive on several threads at once.

#ifndef BRIGADE_REDUCER_REDUCER_H_
#define BRIGADE_REDUCER_REDUCER_H_

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/hooks/gradient_hooks.h"
#include "brigade/hooks/output_tensors.h"
#include "brigade/planning/bucket_plan.h"
#include "brigade/reducer/bucket.h"
#include "brigade/reducer/error_texts.h"
#include "brigade/reducer/failure_channel.h"
#include "brigade/reducer/iteration_state.h"
#include "brigade/reducer/parameter_table.h"
#include "brigade/reducer/ready_order.h"
#include "brigade/reducer/reduced_iterations.h"
#include "brigade/reducer/reducer_options.h"
#include "brigade/reducer/statistics.h"

namespace brigade {

class Reducer : private GradientListener {
 public:
  // Collective: every rank of `group` constructs its reducer with the same
  // parameters (number, shapes, strides, dtypes) and options. Parameters keep
  // their values; making those equal is the caller's business.
  //
  // Errors: ValueError, on every rank alike, if there is no parameter, one does
  // not require a gradient, is not a leaf or is listed twice; a cap is <= 0;
  // the plan misses or repeats a parameter, or mixes dtypes, devices or sparse
  // and dense gradients in a bucket; or ranks differ.
  Reducer(std::vector<at::Tensor> parameters,
          c10::intrusive_ptr<c10d::ProcessGroup> group,
          ReducerOptions options = {});

  // Takes its hooks off the parameters, also while a graph is alive, and waits
  // for collectives in flight. Gradients that are views of buckets stay valid.
  ~Reducer();

  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // The next backward will be reduced. Call it on what forward returned, on
  // every rank the same number of times. `outputs` may be any nest of tensors
  // (hooks/output_tensors.h).
  //
  // Errors: RuntimeError if the last prepared backward left parameters without
  // gradients; DistBackendError if a peer fails.
  template <typename Outputs>
  void prepare_for_backward(const Outputs& outputs) {
    prepare(tensors_of(outputs));
  }

  // Parameters by bucket, in launch order. Changes once, when it is rebuilt.
  BucketPlan plan() const;

  ReducerStatistics statistics() const;

 private:
  // The plan and the buckets that carry it out.
  struct BoundPlan {
    BucketPlan plan;
    std::vector<Bucket> buckets;
  };

  void prepare(const std::vector<at::Tensor>& outputs);
  void on_gradient_ready(size_t parameter) override;
  void on_backward_end(int64_t iteration);
  void on_backward_abandoned(int64_t iteration);

  // REQUIRES: mutex_ held, for all that follow.
  void watch_backward(int backward_id);
  void launch_full_buckets();
  void finalize();
  void abandon();
  void realign();
  void rebuild();
  BoundPlan bind(BucketPlan plan) const;
  enum class Source { kHook, kFuture };  // of an error
  [[noreturn]] void rethrow(std::exception_ptr error, Source source,
                            size_t bucket, int64_t iteration);
  Occasion occasion(int64_t iteration) const;

  // Constant after construction.
  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const ReducerOptions options_;  // its comm_hook is never null
  const ParameterTable table_;
  const std::shared_ptr<ReducedIterations> reduced_;

  mutable std::mutex mutex_;
  // Guarded by mutex_.
  BoundPlan bound_;
  std::shared_ptr<IterationState> iteration_;  // null between iterations
  ReadyOrder ready_order_;
  FailureChannel failure_channel_;
  ReducerStatistics statistics_;

  GradientHooks hooks_;  // last: hooks come off before anything else goes
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_REDUCER_H_
