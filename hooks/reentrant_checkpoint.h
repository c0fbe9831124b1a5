// The node that stands for a function in the graph, and runs it in backward.
//
// Behind checkpoint() of the reentrant kind.
//
// Thread safety: backward may run it on any thread.

#ifndef BRIGADE_HOOKS_REENTRANT_CHECKPOINT_H_
#define BRIGADE_HOOKS_REENTRANT_CHECKPOINT_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "brigade/hooks/autograd_node.h"

namespace brigade {

class ReentrantCheckpoint {
 public:
  // Returns all tensors of its outputs, always in the same order.
  using Function =
      std::function<std::vector<at::Tensor>(std::span<const at::Tensor>)>;

  // Made just before the first run, on its thread.
  ReentrantCheckpoint(std::span<const at::Tensor> inputs,
                      bool preserve_rng_state, Function function);

  // The first run is under this.
  class FirstRun {
   public:
    FirstRun();
    ~FirstRun();

    FirstRun(const FirstRun&) = delete;
    FirstRun& operator=(const FirstRun&) = delete;

   private:
    const at::NoGradGuard no_grad_;
    const bool cast_cache_before_;
  };

  // Makes `output` an output of the node. Call it for all of the first run, in
  // their order. Those of integer type stay as they are.
  void adopt(at::Tensor& output);

 private:
  class RunAgain;
  const NodePtr node_;  // a RunAgain
};

// Throws ValueError: these outputs can't be given another history.
[[noreturn]] void refuse_outputs_of_reentrant_checkpoint();

}  // namespace brigade

#endif  // BRIGADE_HOOKS_REENTRANT_CHECKPOINT_H_
