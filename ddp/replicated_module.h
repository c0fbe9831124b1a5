// Keeps the copies of one module on all ranks equal: parameters and buffers at
// the start, buffers before each forward, gradients after each backward.
//
// The part of data parallelism that does not depend on the module's type;
// distributed_data_parallel.h puts the type around it.
//
// Thread safety: one call at a time.

#ifndef BRIGADE_DDP_REPLICATED_MODULE_H_
#define BRIGADE_DDP_REPLICATED_MODULE_H_

#include <ATen/core/Tensor.h>

#include <functional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/ddp/module_tensors.h"
#include "brigade/reducer/reducer.h"

namespace brigade {

struct DistributedDataParallelOptions {
  // Parameter names are taken from the module unless given.
  ReducerOptions reducer = {};

  // Rank 0's buffers (running means and the like) are broadcast before every
  // forward that will be reduced. Costs one collective per forward and dtype; a
  // module without buffers pays nothing.
  bool broadcast_buffers = true;
};

class ReplicatedModule {
 public:
  // Called at each broadcast, since a script module may replace its buffers.
  using BufferLookup = std::function<std::vector<at::Tensor>()>;

  // Collective. Verifies that all ranks hold the same module, then gives every
  // rank the parameters and buffers of rank 0.
  //
  // Errors: ValueError on every rank if one has no parameter that requires a
  // gradient, or if parameters or buffers differ in number, name, shape,
  // strides, dtype or requires_grad; and what Reducer's constructor throws.
  ReplicatedModule(const ModuleTensors& module, BufferLookup buffers,
                   c10::intrusive_ptr<c10d::ProcessGroup> group,
                   DistributedDataParallelOptions options);

  // Collective if buffers are broadcast. Does nothing while gradients are not
  // being recorded or not synchronised.
  void before_forward();

  // Prepares the reducer, unless gradients are not being recorded or not
  // synchronised.
  void after_forward(const std::vector<at::Tensor>& outputs);

  // While off, backward accumulates gradients on this rank only.
  bool synchronizes() const { return synchronizes_; }
  void set_synchronizes(bool value) { synchronizes_ = value; }

  Reducer& reducer() { return reducer_; }

 private:
  bool will_reduce() const;
  void broadcast_from_rank_0(const std::vector<at::Tensor>& tensors,
                             const char* what) const;

  const BufferLookup buffers_;
  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const bool broadcast_buffers_;
  bool synchronizes_ = true;
  Reducer reducer_;
};

}  // namespace brigade

#endif  // BRIGADE_DDP_REPLICATED_MODULE_H_
