// Hooks of gradient accumulators: call a listener after `.grad` holds a
// parameter's gradient of this backward, or a sink has taken it instead.
//
// Keeps the accumulators alive, which autograd holds weakly. The destructor
// takes the hooks off, even while a graph that leads to them is alive.
//
// Thread safety: listener and sink are called on whichever thread runs the
// accumulator, on several at once for parameters of several devices. Construct
// and destroy while no backward through the parameters is running.

#ifndef BRIGADE_HOOKS_GRADIENT_HOOKS_H_
#define BRIGADE_HOOKS_GRADIENT_HOOKS_H_

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "brigade/hooks/autograd_node.h"
#include "brigade/planning/bucket_plan.h"

namespace brigade {

// Throws RuntimeError that says what to do instead: compiled autograd runs a
// graph of its own, in which hooks of C++ have no place.
[[noreturn]] void refuse_compiled_autograd();

// Whether it is a post-hook of GradientHooks.
bool is_gradient_hook(const torch::autograd::FunctionPostHook& hook);

class GradientHooks {
 public:
  // Called for each gradient. `variable`: the place in `replicas`.
  // `is_defined`: false if backward reached the parameter with an undefined
  // gradient, which changes nothing in `.grad` and is not taken by a sink. What
  // it throws comes out of backward().
  using Listener = std::function<void(VariableIndex variable, bool is_defined)>;

  // Takes a gradient in place of `.grad`, which stays as it is: summed over the
  // uses of the parameter in this backward, after the user's hooks on the
  // tensor. `gradient`: of the parameter's shape, of any layout, with a history
  // under create_graph; must not be written. Called before the listener, with
  // the accumulator's stream current. What it throws comes out of backward().
  //
  // Not taken: undefined gradients, and those that autograd::grad returns.
  // Users' hooks after accumulation run, and find `.grad` without it.
  using Sink =
      std::function<void(VariableIndex variable, const at::Tensor& gradient)>;

  // `replicas[r]` holds the parameters of local replica r, equally many each.
  // `sink`: null for none.
  //
  // REQUIRES: every parameter is a leaf that requires a gradient.
  GradientHooks(std::span<const std::vector<at::Tensor>> replicas,
                Listener listener, Sink sink = nullptr);
  ~GradientHooks();

  // From here on the listener is told nothing. Not to be called during a
  // backward through the parameters.
  void remove();
  bool are_removed() const { return registrations_.empty(); }

  // The first variable that has lost its hook, which happens when it is moved
  // to another device or dtype; nullopt while all have theirs, or are removed.
  //
  // REQUIRES: `replicas` as given to the constructor.
  std::optional<VariableIndex> first_detached(
      std::span<const std::vector<at::Tensor>> replicas) const;

  // Replica by replica, by parameter; alive as long as this object. Empty once
  // hooks are removed.
  std::vector<torch::autograd::Node*> accumulators() const;

  GradientHooks(const GradientHooks&) = delete;
  GradientHooks& operator=(const GradientHooks&) = delete;

 private:
  friend class ReadyHook;

  struct Registration {
    NodePtr accumulator;
    uintptr_t key;
    const torch::autograd::FunctionPreHook* taking;  // null without a sink
  };

  void add(const at::Tensor& parameter, VariableIndex variable);

  const Listener listener_;
  const Sink sink_;
  std::vector<Registration> registrations_;  // as accumulators()
  std::atomic<class ReadyHook*> last_called_ = nullptr;
};

}  // namespace brigade

#endif  // BRIGADE_HOOKS_GRADIENT_HOOKS_H_
