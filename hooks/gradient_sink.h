// Takes gradients in place of `.grad`.
//
// With a sink, GradientHooks hand each gradient on here as its accumulator gets
// it: summed over the uses of the parameter in this backward, in the
// accumulator's precision, behind the user's hooks on the tensor. Accumulators
// get nothing: `.grad` stays as it is, the gradient is freed as soon as the
// sink has let go of it, and then the listener hears of it as ever.
//
// Not handed on: undefined gradients, and those that autograd::grad returns.
// To know: hooks that users put on a tensor to run behind accumulation still
// run, and find `.grad` without this gradient.

#ifndef BRIGADE_HOOKS_GRADIENT_SINK_H_
#define BRIGADE_HOOKS_GRADIENT_SINK_H_

#include <ATen/core/Tensor.h>

#include "brigade/planning/variable_index.h"

namespace brigade {

class GradientSink {
 public:
  // `gradient`: of the shape of the parameter, defined, of any layout, and with
  // a history under create_graph. It may be part of a tensor of the user's: it
  // is not to be written. What this throws comes out of backward(), and the
  // listener is not told of the variable then.
  //
  // Called on the thread that calls the listener next, with the accumulator's
  // stream current.
  virtual void take(VariableIndex variable, const at::Tensor& gradient) = 0;

 protected:
  ~GradientSink() = default;
};

}  // namespace brigade

#endif  // BRIGADE_HOOKS_GRADIENT_SINK_H_
