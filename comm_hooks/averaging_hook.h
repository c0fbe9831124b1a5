// The class of the built-in comm hooks: averaging all-reduces, in the
// gradients' dtype or a smaller one, by the group, in shared memory, or in rank
// order. The divisor may change between iterations.
//
// Thread safety: one call at a time.

#ifndef BRIGADE_COMM_HOOKS_AVERAGING_HOOK_H_
#define BRIGADE_COMM_HOOKS_AVERAGING_HOOK_H_

#include <functional>
#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include "brigade/comm_hooks/hook_traits.h"

namespace brigade {

class OrderedAllReduce;

class AveragingHook final : public c10d::CommHookInterface,
                            public CommHookExtension {
 public:
  // `wire_dtype`: nullopt for the gradients' own; only larger floating-point
  // gradients are compressed. Complex buckets travel as pairs of reals.
  // `ordered`: sums in place of the group, and divides the sum; null: gradients
  // are divided when they are packed. `takes_host_sums`: for a hook of one
  // reducer. Does not keep the group alive. Errors: ValueError if it is null.
  explicit AveragingHook(
      const c10::intrusive_ptr<c10d::ProcessGroup>& group,
      std::optional<at::ScalarType> wire_dtype = std::nullopt,
      std::shared_ptr<OrderedAllReduce> ordered = nullptr,
      bool takes_host_sums = false);

  // Until the next call: the divisor is the world size.
  void divide_by_world_size();

  // Until the next call: the divisor is the result of `divisor`, equal on all
  // ranks and not 0. It is asked once: when the first bucket is packed, or
  // earlier by a reducer that is made with this hook, is given it, or plans its
  // buckets anew; it may wait for a collective that every rank has launched
  // before. Where sums are ordered: when the first bucket is launched, by ranks
  // without data too; it may launch a collective then.
  void divide_by(std::function<double()> divisor);

  HookTraits traits() const override {
    return {.declares_wire_format = true,
            .takes_host_sums = takes_host_sums_ && !ordered_,
            .fails_by_network_only = true,
            .lets_go_of_buffer = true,
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
  std::shared_ptr<HostSums> host_sums_;  // null: the group adds up
  mutable std::function<double()> ask_;  // empty: known
  mutable double divisor_;
};

// What a reducer does that was given no hook. Arguments: as AveragingHook's.
std::shared_ptr<AveragingHook> default_hook(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    std::optional<at::ScalarType> wire_dtype = std::nullopt,
    std::shared_ptr<OrderedAllReduce> ordered = nullptr);

}  // namespace brigade

#endif  // BRIGADE_COMM_HOOKS_AVERAGING_HOOK_H_
