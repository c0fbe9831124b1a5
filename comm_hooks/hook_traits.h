// Properties of a comm hook beyond c10d::CommHookInterface, asked once, when
// the hook is set.
//
// Thread safety: const methods are as those of the hook.

#ifndef BRIGADE_COMM_HOOKS_HOOK_TRAITS_H_
#define BRIGADE_COMM_HOOKS_HOOK_TRAITS_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <utility>

namespace brigade {

class HostSums;

struct WireFormat {
  at::ScalarType dtype;  // of the buffer that travels
  double scale = 1.0;    // multiplies every gradient before the cast

  friend bool operator==(const WireFormat&, const WireFormat&) = default;
};

class CommHookExtension;

// The defaults are those of a user's hook.
struct HookTraits {
  // Gets gradients scaled and cast, which packing does in the same pass. Other
  // hooks get raw gradients in the parameters' dtype.
  bool declares_wire_format = false;
  // It, or a hook that it calls, uses HostSums in place of the group.
  bool takes_host_sums = false;
  // No code of a user's runs in runHook() or its future.
  bool fails_by_network_only = false;
  // The bucket's buffer is unused once the hook's future is complete: it may
  // become the gradients' memory.
  bool lets_go_of_buffer = false;
  // Sums in rank order, however gradients are cut into buckets.
  bool sums_in_order = false;
  // Its errors are not wrapped into one that names bucket, iteration and rank.
  bool throws_own_errors = false;
  // It, or a hook that it calls, updates parameters while backward runs.
  bool steps_parameters = false;
  // For messages; ranks are compared by it. Empty: none.
  std::string name = {};

  // Set by traits_of(). They point into the hook, which they do not own.
  c10d::CommHookInterface* hook = nullptr;         // never null
  const CommHookExtension* wire_format = nullptr;  // null: gets raw gradients
  CommHookExtension* listener = nullptr;           // null: not interested
  CommHookExtension* host_sums = nullptr;          // null: takes none

  // Of the buffer that travels.
  at::ScalarType wire_dtype(at::ScalarType gradient_dtype) const;
};

// A hook derives from this, too, to have other traits than a user's.
class CommHookExtension {
 public:
  // Does not change.
  virtual HookTraits traits() const = 0;

  // The format for gradients of `gradient_dtype`, if it declares one. The dtype
  // is asked for once, the scale for every bucket of every iteration.
  virtual WireFormat wire_format(at::ScalarType gradient_dtype) const {
    return {.dtype = gradient_dtype};
  }

  // Called before the first bucket of an iteration is packed. `has_data`: false
  // on a rank that has run out of data and sends zeros; when such an iteration
  // is over, called with true. Must not communicate: a rank that fails before
  // this sends its zeros without having called it.
  virtual void iteration_begins(bool /*has_data*/) {}

  // The sums of the hook's group. On all ranks, before a bucket travels.
  // REQUIRES: traits().takes_host_sums.
  virtual void take_host_sums(std::shared_ptr<HostSums> /*sums*/) {}

 protected:
  ~CommHookExtension() = default;
};

HookTraits traits_of(c10d::CommHookInterface& hook);

// "comm hook fp16", for errors.
std::string describe(const HookTraits& hook);

// A hook around another one. It packs as that one does (raw gradients if that
// one has no wire format), and has its traits, but keeps buffers and takes no
// host sums.
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

// The tensor in a hook's future: a tensor, a list of one tensor, or a Python
// object that holds one. None gives an undefined tensor. Errors: TypeError for
// anything else.
at::Tensor tensor_of_hook_result(const c10::IValue& result);

// A hook's weak reference to its group: a group whose last reference lay in a
// continuation would end on its backend's thread, and wait there for itself.
//
// Thread safety: any thread.
class GroupReference {
 public:
  // Errors: ValueError if `group` is null; `user` names who wants it.
  GroupReference(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                 const char* user)
      : group_(group), user_(user) {
    TORCH_CHECK_VALUE(group, user, " needs a process group, got null");
    size_ = group->getSize();
  }

  // Errors: ValueError if the group is gone, which is no fault of the network.
  c10::intrusive_ptr<c10d::ProcessGroup> lock() const {
    c10::intrusive_ptr<c10d::ProcessGroup> group = group_.lock();
    TORCH_CHECK_VALUE(
        group, user_,
        ": its process group is gone.\nKeep the group, or the reducer that was "
        "made with it, as long as the hook is used.");
    return group;
  }

  int size() const { return size_; }

 private:
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group_;
  const char* user_;
  int size_ = 0;
};

}  // namespace brigade

#endif  // BRIGADE_COMM_HOOKS_HOOK_TRAITS_H_
