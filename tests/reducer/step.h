#ifndef BRIGADE_TESTS_REDUCER_STEP_H_
#define BRIGADE_TESTS_REDUCER_STEP_H_

#include <ATen/core/Tensor.h>

#include "brigade/reducer/reducer.h"

namespace brigade::testing {

// One iteration, whose backward goes through `loss`.
inline void step(Reducer& reducer, const at::Tensor& loss) {
  reducer.prepare_for_backward(loss);
  loss.backward();
}

}  // namespace brigade::testing

#endif  // BRIGADE_TESTS_REDUCER_STEP_H_
