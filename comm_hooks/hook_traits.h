// Properties of a comm hook beyond c10d::CommHookInterface, helpers for hooks
// and their callers, and the class of the built-in hooks.
//
// Thread safety: const methods are as safe as those of the hook.

#ifndef BRIGADE_COMM_HOOKS_HOOK_TRAITS_H_
#define BRIGADE_COMM_HOOKS_HOOK_TRAITS_H_

#include <ATen/core/DimVector.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <utility>

#include "brigade/comm/ordered/ordered_collectives.h"

namespace brigade {

class HostSums;

// ---- Properties.

struct WireFormat {
  at::ScalarType dtype;  // of the buffer that is reduced
  double scale = 1.0;    // multiplies every gradient before the cast

  friend bool operator==(const WireFormat&, const WireFormat&) = default;
};

class CommHookExtension;

// The defaults are those of a user's hook. Read once, when the hook is set.
struct HookTraits {
  // The hook gets gradients that packing has scaled and cast (wire_format()).
  // Other hooks get undivided gradients in the parameters' dtype.
  bool declares_wire_format = false;
  // The hook, or one that it wraps, may reduce with HostSums.
  bool takes_host_sums = false;
  // runHook() and its future run no user code.
  bool fails_by_network_only = false;
  // The bucket's buffer is unused after the hook's future is complete, and may
  // become the gradients' memory.
  bool releases_buffer = false;
  // Sums in rank order, so that bits do not depend on the buckets.
  bool sums_in_order = false;
  // Its errors are not wrapped with bucket, iteration and rank.
  bool throws_own_errors = false;
  // The hook, or one that it wraps, updates parameters during backward.
  bool steps_parameters = false;
  // For messages; equal on all ranks. Empty: none.
  std::string name = {};

  // Set by traits_of(). They point to the hook and do not own it.
  c10d::CommHookInterface* hook = nullptr;         // never null
  const CommHookExtension* wire_format = nullptr;  // null: no wire format
  CommHookExtension* listener = nullptr;           // null: none
  CommHookExtension* host_sums = nullptr;          // null: takes none

  // Returns the dtype of the buffer that is reduced.
  at::ScalarType wire_dtype(at::ScalarType gradient_dtype) const;
};

// Second base class of hooks whose traits are not the defaults.
class CommHookExtension {
 public:
  // Constant.
  virtual HookTraits traits() const = 0;

  // Returns the wire format, if the hook declares one. The dtype is read once,
  // the scale for every bucket of every iteration.
  virtual WireFormat wire_format(at::ScalarType gradient_dtype) const {
    return {.dtype = gradient_dtype};
  }

  // Called before the first bucket of an iteration is packed. `has_data`: false
  // on a rank without more data, which sends zeros; called with true after such
  // an iteration. Must not communicate: a rank that fails before this call
  // sends zeros without it.
  virtual void iteration_begins(bool /*has_data*/) {}

  // Sets the HostSums of the hook's group, on all ranks, before the first
  // bucket. REQUIRES: traits().takes_host_sums.
  virtual void take_host_sums(std::shared_ptr<HostSums> /*sums*/) {}

 protected:
  ~CommHookExtension() = default;
};

HookTraits traits_of(c10d::CommHookInterface& hook);

// "comm hook fp16", for errors.
std::string describe(const HookTraits& hook);

// Base class of a hook that wraps another one. It has that hook's wire format
// and traits, but keeps the bucket's buffer and takes no HostSums.
class WrappingHook : public c10d::CommHookInterface, public CommHookExtension {
 public:
  // REQUIRES: `hook` is not null.
  explicit WrappingHook(std::shared_ptr<c10d::CommHookInterface> hook)
      : hook_(std::move(hook)), traits_(traits_of(*hook_)) {}

  c10::intrusive_ptr<c10::ivalue::Future> runHook(
      c10d::GradBucket& bucket) override {
    return hook_->runHook(bucket);
  }
  at::Tensor parseHookResult(const c10::IValue& result) override {
    return hook_->parseHookResult(result);
  }
  HookTraits traits() const override;
  WireFormat wire_format(at::ScalarType gradient_dtype) const override;
  void iteration_begins(bool has_data) override {
    if (traits_.listener) traits_.listener->iteration_begins(has_data);
  }

 protected:
  const std::shared_ptr<c10d::CommHookInterface> hook_;
  const HookTraits traits_;  // of hook_
};

// Returns the tensor in a hook's future, which holds a tensor, a list of one
// tensor, or a Python object with one. None gives an undefined tensor. Errors:
// TypeError for any other value.
at::Tensor tensor_of_hook_result(const c10::IValue& result);

// Returns the strides of a parameter's gradient in a flat buffer. They are the
// parameter's if it is non-overlapping and dense, otherwise contiguous ones in
// `storage`.
at::IntArrayRef gradient_strides(const at::Tensor& parameter,
                                 at::DimVector& storage);

// A hook's weak reference to its group. If a continuation held the last
// reference, the group would end on its backend's thread and wait for itself.
//
// Thread safety: any thread.
class GroupReference {
 public:
  // `user` names the hook in errors. Errors: ValueError if `group` is null.
  GroupReference(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                 const char* user)
      : group_(group), user_(user) {
    TORCH_CHECK_VALUE(group, user, ": the process group is null.");
    size_ = group->getSize();
  }

  // Errors: ValueError if the group has been destroyed; not a PeerError, since
  // the network is not at fault.
  c10::intrusive_ptr<c10d::ProcessGroup> lock() const {
    c10::intrusive_ptr<c10d::ProcessGroup> group = group_.lock();
    TORCH_CHECK_VALUE(group, user_,
                      ": its process group has been destroyed.\nKeep the "
                      "group, or the reducer that was made with it, as long as "
                      "the hook is used.");
    return group;
  }

  int size() const { return size_; }

 private:
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group_;
  const char* user_;
  int size_ = 0;
};

// ---- Built-in hooks.

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

#endif  // BRIGADE_COMM_HOOKS_HOOK_TRAITS_H_
