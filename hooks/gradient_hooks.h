// Tells when the gradient of a parameter has been accumulated.
//
// Each parameter's gradient accumulator gets a post-hook that calls the
// listener after `.grad` holds the parameter's gradient of this backward, or a
// sink has taken it. The hooks live as long as this object: its destructor
// takes them off the accumulators, even while a graph that leads to them is
// alive.
//
// The accumulators are kept alive here. Autograd holds them weakly, and a hook
// dies with its accumulator.
//
// Thread safety: the listener is called on whichever thread runs the
// accumulator, on several at once for parameters of several devices. Construct
// and destroy while no backward through the parameters is running.

#ifndef BRIGADE_HOOKS_GRADIENT_HOOKS_H_
#define BRIGADE_HOOKS_GRADIENT_HOOKS_H_

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <torch/csrc/autograd/function.h>

#include <atomic>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "brigade/hooks/autograd_node.h"
#include "brigade/hooks/ready_hook.h"
#include "brigade/hooks/taking_hook.h"
#include "brigade/planning/variable_index.h"

namespace brigade {

class GradientHooks {
 public:
  // `replicas[r]` holds the parameters of local replica r, equally many each.
  //
  // `listener(variable, is_defined)` is called for each gradient. `variable`:
  // its place in `replicas`. `is_defined`: false if backward reached the
  // parameter with an undefined gradient, which changes nothing in `.grad` and
  // is not taken by a sink. What it throws comes out of backward(). Each hook
  // has a copy: what it refers to outlives this object.
  //
  // REQUIRES: every parameter is a leaf that requires a gradient.
  template <typename Listener>
  requires std::invocable<const Listener&, VariableIndex, bool> GradientHooks(
      std::span<const std::vector<at::Tensor>> replicas,
      const Listener& listener) {
    add(replicas, listener, nullptr);
  }

  // The same, where `sink` takes each gradient in place of `.grad`: see
  // taking_hook.h. REQUIRES: `sink` outlives this object.
  template <typename Listener, TakesGradients Sink>
  requires std::invocable<const Listener&, VariableIndex, bool> GradientHooks(
      std::span<const std::vector<at::Tensor>> replicas,
      const Listener& listener, Sink& sink) {
    const auto make_taking = [&](ReadyHook& ready) {
      return std::unique_ptr<torch::autograd::FunctionPreHook>(
          std::make_unique<TakingHook<Sink>>(sink, ready));
    };
    const c10::function_ref<MakeTaking> made_by = make_taking;
    add(replicas, listener, &made_by);
  }
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
  struct Registration {
    NodePtr accumulator;
    uintptr_t key;
    const torch::autograd::FunctionPreHook* taking;  // null without a sink
  };
  using MakeReady = std::unique_ptr<ReadyHook>(
      std::byte* place, VariableIndex variable,
      const torch::autograd::Node* accumulator, const at::Tensor& parameter);
  using MakeTaking =
      std::unique_ptr<torch::autograd::FunctionPreHook>(ReadyHook& ready);

  // `make_taking`: null without a sink.
  template <typename Listener>
  void add(std::span<const std::vector<at::Tensor>> replicas,
           const Listener& listener,
           const c10::function_ref<MakeTaking>* make_taking) {
    using Hook = ReadyHookFor<Listener>;
    static_assert(alignof(Hook) <= __STDCPP_DEFAULT_NEW_ALIGNMENT__);
    add(
        replicas, sizeof(Hook),
        [&](std::byte* place, VariableIndex variable,
            const torch::autograd::Node* accumulator,
            const at::Tensor& parameter) -> std::unique_ptr<ReadyHook> {
          return std::unique_ptr<ReadyHook>(new (place) Hook(
              listener, variable, accumulator, parameter, last_called_));
        },
        make_taking);
  }
  void add(std::span<const std::vector<at::Tensor>> replicas,
           size_t bytes_per_hook, c10::function_ref<MakeReady> make_ready,
           const c10::function_ref<MakeTaking>* make_taking);

  std::unique_ptr<std::byte[]> hooks_;       // memory, one after the other
  std::vector<Registration> registrations_;  // as accumulators()
  std::atomic<ReadyHook*> last_called_ = nullptr;
};

}  // namespace brigade

#endif  // BRIGADE_HOOKS_GRADIENT_HOOKS_H_
