// Autograd hooks: GradientHooks (a gradient is ready), watch_outputs()
// (backward reaches an output of a forward), watch_backward_end(),
// SavedTensorScope (autograd saves a tensor), and the user's post-accumulate
// hooks.
//
// Communication hooks, which reduce buckets, are in comm_hooks/.

#ifndef BRIGADE_HOOKS_AUTOGRAD_HOOKS_H_
#define BRIGADE_HOOKS_AUTOGRAD_HOOKS_H_

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "brigade/planning/bucket_plan.h"

namespace brigade {

// Pointers to autograd nodes: std::shared_ptr up to torch 2.12,
// c10::intrusive_ptr later. Code outside this header names neither type.
using NodePtr = decltype(torch::autograd::Edge::function);
using WeakNodePtr = decltype(torch::autograd::AutogradMeta::grad_accumulator_);

// Returns whether `weak` refers to `node`, without reading the node's memory.
template <typename Weak, typename Strong>
bool points_to(const Weak& weak, const Strong& node) {
  if constexpr (requires { weak.owner_before(node); }) {
    return !weak.owner_before(node) && !node.owner_before(weak);
  } else {
    return weak._unsafe_get_target() == node.get();
  }
}

// Hooks of gradient accumulators: call a listener after `.grad` holds a
// parameter's gradient of this backward, or after a sink has taken it.
//
// Owns the accumulators, which autograd references weakly. The destructor
// removes the hooks, also from a graph that is still alive.
//
// Thread safety: listener and sink run on the accumulator's thread, for
// parameters of several devices on several threads at once. Construct and
// destroy while no backward through the parameters is running.
class GradientHooks {
 public:
  // Called for each gradient. `variable`: the position in `replicas`.
  // `is_defined`: false for an undefined gradient, which does not change
  // `.grad` and is not passed to the sink. Exceptions propagate out of
  // backward().
  using Listener = std::function<void(VariableIndex variable, bool is_defined)>;

  // Takes a gradient in place of `.grad`, which does not change. The gradient
  // is the sum over all uses of the parameter in this backward, after the
  // user's hooks on the tensor.
  // `gradient`: of the parameter's shape and any layout, with a history under
  // create_graph; must not be written.
  // Called before the listener, with the accumulator's stream current.
  // Exceptions propagate out of backward().
  //
  // Not called for undefined gradients and for torch::autograd::grad(). The
  // user's post-accumulate hooks still run; `.grad` lacks the gradient then.
  using Sink =
      std::function<void(VariableIndex variable, const at::Tensor& gradient)>;

  // `replicas[r]`: the parameters of local replica r, the same number in each.
  //
  // REQUIRES: every parameter is a leaf that requires a gradient.
  GradientHooks(std::span<const std::vector<at::Tensor>> replicas,
                Listener listener, Sink sink = nullptr);
  ~GradientHooks();

  // REQUIRES: no backward through the parameters is running.
  void remove();
  bool are_removed() const { return registrations_.empty(); }

  // Returns the first variable that has lost its hook because the parameter was
  // moved to another device or dtype. Returns nullopt if there is none, or if
  // the hooks are removed.
  //
  // REQUIRES: `replicas` as given to the constructor.
  std::optional<VariableIndex> first_detached(
      std::span<const std::vector<at::Tensor>> replicas) const;

  // Ordered by replica and parameter, and owned by this object; empty after
  // remove().
  std::vector<torch::autograd::Node*> accumulators() const;

  GradientHooks(const GradientHooks&) = delete;
  GradientHooks& operator=(const GradientHooks&) = delete;

 private:
  friend class ReadyHook;

  struct Registration {
    NodePtr accumulator;
    uintptr_t key;                                      // of the post-hook
    const torch::autograd::FunctionPreHook* sink_hook;  // null without a sink
  };

  void add(const at::Tensor& parameter, VariableIndex variable);

  const Listener listener_;
  const Sink sink_;
  std::vector<Registration> registrations_;  // as accumulators()
  std::atomic<class ReadyHook*> last_called_ = nullptr;
};

// Calls `on_reached` when backward has computed the gradient of one of
// `outputs`, once per output and backward, on the thread that computes it.
// Does nothing if `owner` has expired by then.
//
// Skips outputs without a history: a leaf would keep the hook after the graph
// is gone. Returns whether any output has a history.
bool watch_outputs(std::span<const at::Tensor> outputs,
                   std::weak_ptr<void> owner, std::function<void()> on_reached);

// ---- Called inside a backward, by a hook or a node.

// Calls one of two functions when the running graph task ends, and holds
// `owner` during the call. Calls neither if `owner` has expired by then.
//
// `on_end`: after all nodes, the callbacks that they queued and the callbacks
// queued by those, on the thread that ends the graph task. Exceptions
// propagate out of backward().
// `on_abandoned`: after an exception has ended the graph task. With several
// devices, backward() may throw shortly before the call.
//
// REQUIRES: `on_abandoned` does not throw.
//
// Errors: c10::Error outside of a backward.
void watch_backward_end(std::weak_ptr<void> owner, std::function<void()> on_end,
                        std::function<void()> on_abandoned);

// Returns the id of the backward that this thread executes; -1 outside of one.
// Reentrant backwards have their own ids.
int running_backward_id();

// Returns whether the backward that this thread executes accumulates the
// gradients of all leaves that it reaches. False if the caller passed `inputs`
// or uses torch::autograd::grad().
bool accumulates_all_gradients();

// Registers callbacks as watch_backward_end() does. If several models take part
// in the backward, the last one to register ends first. So a failed rank
// reports in the segment in which its peers wait, not in an outer one that they
// end later. If `on_end` throws, the other models are abandoned, and
// backward() throws it.
void end_with_backward(std::weak_ptr<void> owner, std::function<void()> on_end,
                       std::function<void()> on_abandoned);

// ---- The user's post-accumulate-grad hooks, which run on sharded gradients.

// Scope that hides hooks of Tensor.register_post_accumulate_grad_hook() from
// autograd, which would call them with this rank's unsharded gradients.
class HiddenPostAccumulateHooks {
 public:
  explicit HiddenPostAccumulateHooks(const std::vector<at::Tensor>& leaves);
  ~HiddenPostAccumulateHooks();
  HiddenPostAccumulateHooks(const HiddenPostAccumulateHooks&) = delete;
  HiddenPostAccumulateHooks& operator=(const HiddenPostAccumulateHooks&) =
      delete;

 private:
  struct Hidden {
    at::Tensor leaf;
    std::unique_ptr<torch::autograd::PostAccumulateGradHook> hook;
  };
  std::vector<Hidden> hidden_;
};

// Returns true if the tensor or its accumulator has such hooks of the user.
bool has_post_accumulate_hooks(const at::Tensor& tensor);

// Calls the hooks of `tensors` at the end of the running backward, without the
// caller's locks; at once if none is running. Calls all of them, then throws
// the first error out of backward(). Calls none if the backward fails earlier.
void call_hooks_after_backward(std::vector<at::Tensor> tensors);

// Called with each error of a hook before the next hook, to clear Python's
// error state before the next call into Python. Set it before any backward.
using ErrorTaker = void (*)(std::exception& error);
void set_error_taker(ErrorTaker taker);

// ---- Saved tensors.

// Scope of default saved-tensor hooks written in C++. While it lives,
// `make_hooks` creates the hooks of each tensor that this thread's autograd
// saves. Scopes nest: the inner scope applies, and Python hooks that are pushed
// inside of it take precedence.
//
// LibTorch's own default hooks are Python objects, which autograd requests from
// its default engine. The first scope replaces that engine, until the process
// exits, with one that forwards all other calls.
//
// Thread safety: a scope affects its own thread only.
class SavedTensorScope {
 public:
  using MakeHooks =
      std::function<std::unique_ptr<torch::autograd::SavedVariableHooks>()>;

  explicit SavedTensorScope(MakeHooks make_hooks);
  ~SavedTensorScope();

  // Returns new hooks of the enclosing scope; null if there is none.
  std::unique_ptr<torch::autograd::SavedVariableHooks> outer_hooks() const {
    return outer_ == nullptr ? nullptr : outer_->make_hooks_();
  }

  SavedTensorScope(const SavedTensorScope&) = delete;
  SavedTensorScope& operator=(const SavedTensorScope&) = delete;

 private:
  friend class SavedTensorEngine;

  const MakeHooks make_hooks_;
  const SavedTensorScope* const outer_;
  const size_t num_python_hooks_;
};

}  // namespace brigade

#endif  // BRIGADE_HOOKS_AUTOGRAD_HOOKS_H_
