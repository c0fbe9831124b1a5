// Gives a sink what a gradient accumulator would add to `.grad`.
//
// With a sink, GradientHooks hand each gradient on as its accumulator gets it:
// summed over the uses of the parameter in this backward, in the accumulator's
// precision, behind the user's hooks on the tensor. Accumulators get nothing:
// `.grad` stays as it is, the gradient is freed as soon as the sink has let go
// of it, and then the listener hears of it as ever.
//
// Not handed on: undefined gradients, and those that autograd::grad returns.
// To know: hooks that users put on a tensor to run behind accumulation still
// run, and find `.grad` without this gradient.

#ifndef BRIGADE_HOOKS_TAKING_HOOK_H_
#define BRIGADE_HOOKS_TAKING_HOOK_H_

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include "brigade/hooks/compiled_autograd.h"
#include "brigade/hooks/ready_hook.h"
#include "brigade/planning/variable_index.h"

namespace brigade {

// `gradient`: of the shape of the parameter, defined, of any layout, and with a
// history under create_graph. It may be part of a tensor of the user's: it is
// not to be written. What take() throws comes out of backward(), and the
// listener is not told of the variable then. Called on the thread that calls
// the listener next, with the accumulator's stream current.
template <typename Sink>
concept TakesGradients = requires(Sink& sink, VariableIndex variable,
                                  const at::Tensor& gradient) {
  sink.take(variable, gradient);
};

// Knows the type of its sink: no virtual call but autograd's. An accumulator
// that gets an undefined gradient leaves `.grad` alone and calls its hooks.
template <TakesGradients Sink>
class TakingHook final : public torch::autograd::FunctionPreHook {
 public:
  // REQUIRES: both, `ready` of the same accumulator, outlive this object.
  TakingHook(Sink& sink, ReadyHook& ready) : sink_(sink), ready_(ready) {}

  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& gradients) override {
    const at::Tensor& gradient = gradients.at(0);
    ready_.set_taken(gradient.defined());
    if (gradient.defined()) sink_.take(ready_.variable(), gradient);
    return {at::Tensor()};
  }

  void compiled_args(
      torch::dynamo::autograd::CompiledNodeArgs&) const override {
    refuse_compiled_autograd();
  }

 private:
  Sink& sink_;
  ReadyHook& ready_;
};

}  // namespace brigade

#endif  // BRIGADE_HOOKS_TAKING_HOOK_H_
