// What autograd calls behind a parameter's gradient accumulator.

#ifndef BRIGADE_HOOKS_READY_HOOK_H_
#define BRIGADE_HOOKS_READY_HOOK_H_

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <cstddef>
#include <utility>

#include "brigade/planning/variable_index.h"

namespace brigade {

// Gradients become ready in much the same order in every backward, each long
// after its accumulator was last used: an accumulator outlives its graphs here,
// and what autograd would make anew, in memory it has just freed, is cold. So a
// hook remembers which one was called after it, and prefetches for that one.
class ReadyHook : public torch::autograd::FunctionPostHook {
 public:
  // Hooks lie side by side where GradientHooks says. An accumulator, which owns
  // its hook, ends it, but does not free it.
  static void* operator new(size_t /*size*/, void* place) { return place; }
  static void operator delete(void* /*hook*/, void* /*place*/) {}
  static void operator delete(void* /*hook*/) {}

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override;

  VariableIndex variable() const { return variable_; }

  // Whether a sink has the gradient that the accumulator is called with.
  void set_taken(bool is_taken) { is_taken_ = is_taken; }

 protected:
  // REQUIRES: `last_called` outlives this object.
  ReadyHook(VariableIndex variable, const torch::autograd::Node* accumulator,
            const at::Tensor& parameter, std::atomic<ReadyHook*>& last_called);

  // Backwards of several threads may mix up what is remembered, which costs
  // them no more than that: hooks live as long as one another.
  void prefetch_next();
  bool is_taken() const { return is_taken_; }

 private:
  const VariableIndex variable_;
  // For their addresses only.
  const torch::autograd::AccumulateGrad* const accumulator_;
  const at::TensorImpl* const parameter_;
  const torch::autograd::AutogradMeta* const autograd_meta_;

  std::atomic<ReadyHook*>& last_called_;
  std::atomic<ReadyHook*> next_ = nullptr;

  bool is_taken_ = false;  // by a sink, in the present call
};

// Calls a listener that it knows the type of: no virtual call but autograd's.
template <typename Listener>
class ReadyHookFor final : public ReadyHook {
 public:
  template <typename... Args>
  explicit ReadyHookFor(const Listener& listener, Args&&... args)
      : ReadyHook(std::forward<Args>(args)...), listener_(listener) {}

  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& outputs,
      const torch::autograd::variable_list& inputs) override {
    prefetch_next();
    listener_(variable(), inputs.at(0).defined() || is_taken());
    return outputs;  // empty: an accumulator has no successors
  }

 private:
  const Listener listener_;
};

}  // namespace brigade

#endif  // BRIGADE_HOOKS_READY_HOOK_H_
