// What a comm hook can say and do beside c10d::CommHookInterface, and the
// answers, asked once, when it is set.
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

// A hook derives from this, too, to say more than that it is one. The defaults
// are those of a user's hook.
class CommHookExtension {
 public:
  // Whether it wants gradients in the bucket's buffer that are scaled and cast
  // already, which the reducer folds into the one pass that packs the bucket.
  // Other hooks get raw gradients in the parameters' dtype.
  virtual bool declares_wire_format() const { return false; }

  // The format for gradients of `gradient_dtype`. The dtype is asked for once,
  // the scale for every bucket of every iteration.
  virtual WireFormat wire_format(at::ScalarType gradient_dtype) const {
    return {.dtype = gradient_dtype};
  }

  // Whether what goes wrong in runHook() or its future is the network's doing:
  // no code of a user's runs there.
  virtual bool fails_by_network_only() const { return false; }

  // Whether nobody writes to the bucket's buffer, or shows it to others, once
  // the hook's future is complete. Then its memory may become the gradients'.
  virtual bool lets_go_of_buffer() const { return false; }

  // Whether the bits of the result are those of the ranks' values, added in
  // the order of the ranks, however gradients are cut into buckets.
  virtual bool sums_in_order() const { return false; }

  // Whether its errors reach the caller of backward as they were thrown. Those
  // of other hooks are wrapped into one that names bucket, iteration and rank.
  virtual bool throws_own_errors() const { return false; }

  // Whether it, or a hook that it calls, updates parameters while backward
  // runs. Does not change.
  virtual bool steps_parameters() const { return false; }

  // For messages; ranks are compared by it. Empty: none.
  virtual std::string hook_name() const { return ""; }

  // Called before the first bucket of an iteration is packed. `has_data`: false
  // on a rank that has run out of data and sends zeros; when such an iteration
  // is over, called with true. Must not communicate: a rank that fails before
  // this sends its zeros without having called it.
  virtual void iteration_begins(bool /*has_data*/) {}

  // Whether it, or a hook that it calls, takes host_sums.h's sums in memory
  // that ranks of one host share, in place of the group's all-reduce. Does not
  // change.
  virtual bool takes_host_sums() const { return false; }

  // Those of the hook's group. On all ranks, before a bucket travels.
  // REQUIRES: takes_host_sums().
  virtual void take_host_sums(std::shared_ptr<HostSums> /*sums*/) {}

 protected:
  ~CommHookExtension() = default;
};

// The answers of a hook. Does not own the hook, into which it points.
struct HookTraits {
  c10d::CommHookInterface* hook = nullptr;         // never null
  const CommHookExtension* wire_format = nullptr;  // null: gets raw gradients
  CommHookExtension* listener = nullptr;           // null: not interested
  CommHookExtension* host_sums = nullptr;          // null: takes none
  bool fails_by_network_only = false;
  bool lets_go_of_buffer = false;
  bool sums_in_order = false;
  bool throws_own_errors = false;
  bool steps_parameters = false;
  std::string name = {};  // empty: it has none

  // Of the buffer that travels.
  at::ScalarType wire_dtype(at::ScalarType gradient_dtype) const;
};

HookTraits traits_of(c10d::CommHookInterface& hook);

// "comm hook fp16", for errors.
std::string describe(const HookTraits& hook);

// A hook around another one. It packs as that one does (raw gradients if that
// one has no wire format), and says what that one says, but that buffers can't
// be let go of and that host sums are not taken.
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
  bool declares_wire_format() const override { return true; }
  WireFormat wire_format(at::ScalarType gradient_dtype) const override;
  bool fails_by_network_only() const override {
    return traits_.fails_by_network_only;
  }
  bool sums_in_order() const override { return traits_.sums_in_order; }
  bool throws_own_errors() const override { return traits_.throws_own_errors; }
  bool steps_parameters() const override { return traits_.steps_parameters; }
  std::string hook_name() const override { return traits_.name; }
  void iteration_begins(bool has_data) override {
    if (traits_.listener) traits_.listener->iteration_begins(has_data);
  }

 protected:
  const std::shared_ptr<c10d::CommHookInterface> hook_;
  const HookTraits traits_;  // of hook_
};

// The tensor in a hook's future: accepts a tensor or a list of one tensor,
// which is what c10d's futures hold, and a Python object that holds one. None
// gives an undefined tensor: the hook has dealt with the gradients itself.
//
// Errors: TypeError for anything else.
at::Tensor tensor_of_hook_result(const c10::IValue& result);

// A hook's reference to its group, which does not keep the group alive: a
// backend runs the hook's continuations on a thread of its own. If one of them
// held the last reference, the group would end on that thread, and wait there
// for itself.
//
// Thread safety: all methods may be called from any thread.
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
