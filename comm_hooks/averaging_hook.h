// The class of the built-in comm hooks, and the all-reduce in rank order that
// `reproducible` uses.

#ifndef BRIGADE_COMM_HOOKS_AVERAGING_HOOK_H_
#define BRIGADE_COMM_HOOKS_AVERAGING_HOOK_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include "brigade/comm/ordered/ordered_collectives.h"
#include "brigade/comm_hooks/hook_traits.h"

namespace brigade {

// All-reduce of a group in rank order. CPU tensors use OrderedCollectives.
// Device tensors get the same bits by an all-to-all of slices, a local sum and
// an all-gather, on a side stream; the host does not wait.
//
// Thread safety: one call at a time, in the same order on all ranks.
class OrderedAllReduce {
 public:
  using FuturePtr = OrderedCollectives::FuturePtr;

  // Construct it on all ranks in the same order. It does not own the group.
  // Errors: ValueError if `group` is null.
  explicit OrderedAllReduce(const c10::intrusive_ptr<c10d::ProcessGroup>& group)
      : group_(group, "OrderedAllReduce") {}

  // Collective; at most once. Errors: as OrderedCollectives'.
  void connect();

  // Calls connect() if any of these tensors is on the CPU.
  void connect_for(std::span<const at::Tensor> tensors);

  // Replaces `tensor` [any shape] by the sum over ranks, times `scale`. The
  // future holds a list of the tensor. The first call with a CPU tensor is
  // collective unless connect() was called.
  //
  // A device tensor is contiguous, real or complex. Before the first launch it
  // allocates up to twice the tensor's size, and four times 1/W of it.
  //
  // Errors: as OrderedCollectives'; on devices OutOfMemoryError, before
  // anything is launched, and the backend's.
  FuturePtr run(const at::Tensor& tensor, double scale);

 private:
  const GroupReference group_;
  std::optional<OrderedCollectives> collectives_;
  std::map<c10::DeviceIndex, c10::Stream> streams_;
};

// Averaging all-reduce in the gradients' dtype or a smaller one: by the group,
// in shared memory, or in rank order. The divisor may change between
// iterations.
//
// Thread safety: one call at a time.
class AveragingHook final : public c10d::CommHookInterface,
                            public CommHookExtension {
 public:
  // `wire_dtype`: nullopt for the gradients' own. Only larger floating-point
  // gradients are compressed; complex buckets are reduced as pairs of reals.
  // `ordered`: sums instead of the group, and divides the sum; null: gradients
  // are divided when they are packed. `takes_host_sums`: for the hook of one
  // reducer. Does not own the group. Errors: ValueError if it is null.
  explicit AveragingHook(
      const c10::intrusive_ptr<c10d::ProcessGroup>& group,
      std::optional<at::ScalarType> wire_dtype = std::nullopt,
      std::shared_ptr<OrderedAllReduce> ordered = nullptr,
      bool takes_host_sums = false);

  // Sets the divisor to the world size, until the next call.
  void divide_by_world_size();

  // Sets the divisor to the result of `divisor`, equal on all ranks and not 0,
  // until the next call. `divisor` is called once, when the first bucket is
  // packed; or earlier, by a reducer that gets this hook or plans its buckets.
  // It may wait for a collective that all ranks launched before.
  //
  // With `ordered`, it is called when the first bucket is launched, also by
  // ranks without data, and may then launch a collective.
  void divide_by(std::function<double()> divisor);

  HookTraits traits() const override {
    return {.declares_wire_format = true,
            .takes_host_sums = takes_host_sums_ && !ordered_,
            .fails_by_network_only = true,
            .releases_buffer = true,
            .sums_in_order = ordered_ != nullptr};
  }
  void take_host_sums(std::shared_ptr<HostSums> sums) override {
    host_sums_ = std::move(sums);
  }
  const std::shared_ptr<HostSums>& host_sums() const { return host_sums_; }

  c10::intrusive_ptr<c10::ivalue::Future> runHook(
      c10d::GradBucket& bucket) override;
  at::Tensor parseHookResult(const c10::IValue& result) override;
  WireFormat wire_format(at::ScalarType gradient_dtype) const override;

 private:
  double divisor() const;

  const GroupReference group_;
  const std::optional<at::ScalarType> wire_dtype_;
  const std::shared_ptr<OrderedAllReduce> ordered_;
  const bool takes_host_sums_;
  std::shared_ptr<HostSums> host_sums_;           // null: the group reduces
  mutable std::function<double()> next_divisor_;  // empty: divisor_ is valid
  mutable double divisor_;
};

// Makes the hook of a reducer without a comm hook. Arguments: as
// AveragingHook's.
std::shared_ptr<AveragingHook> default_hook(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    std::optional<at::ScalarType> wire_dtype = std::nullopt,
    std::shared_ptr<OrderedAllReduce> ordered = nullptr);

}  // namespace brigade

#endif  // BRIGADE_COMM_HOOKS_AVERAGING_HOOK_H_
