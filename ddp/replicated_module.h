// Keeps the copies of one module on all ranks equal: parameters and buffers at
// the start, buffers with each forward, gradients after each backward.
//
// The part of data parallelism that does not depend on the module's type;
// distributed_data_parallel.h and distributed_replicas.h put the type around
// it.
//
// Thread safety: one call at a time.

#ifndef BRIGADE_DDP_REPLICATED_MODULE_H_
#define BRIGADE_DDP_REPLICATED_MODULE_H_

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "brigade/comm_hooks/averaging_hook.h"
#include "brigade/ddp/buffer_sync.h"
#include "brigade/ddp/data_parallel_options.h"
#include "brigade/ddp/forward_precision.h"
#include "brigade/ddp/join.h"
#include "brigade/ddp/module_tensors.h"
#include "brigade/ddp/module_watch.h"
#include "brigade/hooks/forward_argument.h"
#include "brigade/hooks/output_tensors.h"
#include "brigade/reducer/reducer.h"

namespace brigade {

// One local copy of the module.
struct ModuleReplica {
  ModuleTensors tensors;
  BufferLookup buffers;
  ModuleView view;
};

class ReplicatedModule final : public Joinable {
 public:
  // Collective. Verifies that all ranks hold the same module, then gives every
  // rank and every local replica the parameters and buffers of rank 0's replica
  // 0, but for ignored ones and those of parameter groups. REQUIRES: at least
  // one replica.
  //
  // Errors: ValueError on every rank if one has no parameter that requires a
  // gradient, or options that name what it does not have, if its replicas
  // differ, or if parameters or buffers differ across ranks in number, name,
  // shape, strides, dtype or requires_grad; and what Reducer's constructor
  // throws.
  ReplicatedModule(std::vector<ModuleReplica> replicas,
                   c10::intrusive_ptr<c10d::ProcessGroup> group,
                   DistributedDataParallelOptions options);

  // What `forward` returns: the outputs of all replicas. The reducer is
  // prepared for a backward through them, unless gradients are not being
  // recorded or not synchronised. Collective then: every rank calls it equally
  // often.
  //
  // Errors: RuntimeError if the module got other parameters since it was
  // wrapped; what `forward`, the buffer hook, Reducer::meet_peers(),
  // Reducer::prepare_for_backward() and, in mixed precision,
  // ForwardPrecision::run() throw.
  template <typename Forward>
  auto run_forward(const Forward& forward) {
    before_forward();
    auto outputs =
        precision_ ? precision_->run(reducer_->hook_steps_parameters(), forward)
                   : forward();
    after_forward(tensors_of(outputs));
    return outputs;
  }

  // An argument of a replica's forward, in the precision that it runs in.
  template <typename T>
  ForwardArgument<T> argument(T&& value) const {
    return ForwardArgument<T>(
        std::forward<T>(value),
        precision_ ? std::optional(precision_->dtype()) : std::nullopt);
  }

  // While off, backward accumulates gradients on this rank only.
  bool synchronizes() const { return synchronizes_; }
  void set_synchronizes(bool value) { synchronizes_ = value; }

  Reducer& reducer() { return *reducer_; }

  // Collective, not in forward or backward: gives every rank the buffers of
  // rank 0, or of the lowest rank with data while ranks join; by the buffer
  // hook if there is one. They differ when training ends, since they are made
  // equal before forwards (or behind them), and then updated by each rank.
  //
  // Errors: what Reducer::meet_peers() and the hook throw; PeerError, and
  // reducer().can_continue() is false then.
  void sync_buffers();

  // For join().
  const c10::intrusive_ptr<c10d::ProcessGroup>& joined_group() const override {
    return group_;
  }
  void enter(JoinSession& session, bool announces) override;
  void leave() noexcept override;
  void meet_peers() override;
  void shadow() override;
  void copy_from(int rank) override;

 private:
  bool sends_buffers(BufferMode place) const;
  bool opens_with_buffers() const;
  void make_buffers_equal();
  void before_forward();
  void follow_divisor();
  void after_forward(const std::vector<at::Tensor>& outputs);
  bool will_reduce() const;

  // Constant after construction.
  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const std::vector<ModuleReplica> replicas_;
  const std::vector<ParameterGroup> parameter_groups_;
  const BufferMode buffer_mode_;
  const BufferSync buffers_;
  std::vector<ModuleWatch> watches_;          // by replica
  std::shared_ptr<AveragingHook> averaging_;  // null: the hook is the user's
  std::unique_ptr<Reducer> reducer_;
  const std::optional<ForwardPrecision> precision_;  // unset: its own

  bool synchronizes_ = true;
  JoinSession* session_ = nullptr;  // null: not being joined
  bool announces_ = false;          // iterations, to the session
};

}  // namespace brigade

#endif  // BRIGADE_DDP_REPLICATED_MODULE_H_
