// Lets a module compute in a lower precision than its parameters are kept in:
// from the begin of forward to the end of backward their data is a copy.
//
// Autograd then knows the parameters by other accumulators than the reducer
// watches, so the reducer is told of their gradients from here. It delivers
// them in full precision.
//
// Thread safety: one call at a time.

#ifndef BRIGADE_DDP_PRECISION_SWAP_H_
#define BRIGADE_DDP_PRECISION_SWAP_H_

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "brigade/reducer/reducer.h"

namespace brigade {

class PrecisionSwap : public std::enable_shared_from_this<PrecisionSwap> {
 public:
  // `parameters[r]`: those of local replica r, as `reducer` has them. Ends the
  // reducer's own watch over gradients. Parameters that are not floating point
  // stay what they are.
  //
  // REQUIRES: `reducer` outlives this object. Errors: ValueError if it searches
  // for unused parameters.
  PrecisionSwap(std::vector<std::vector<at::Tensor>> parameters,
                at::ScalarType dtype, Reducer& reducer);

  // Full precision again.
  ~PrecisionSwap();

  // Copies in low precision take the place of the parameters' data. What was
  // swapped in before, without a backward, is swapped out.
  void swap_in();

  // The parameters' own data again, and gradients in their dtype. Does nothing
  // if it is there already.
  void swap_out();

  // At the end of the backward through `outputs`, whether it fails or not;
  // a later one, if gradients are still to come.
  void swap_out_after_backward(std::span<const at::Tensor> outputs);

  // A floating-point tensor in the precision of forward; any other as it is.
  at::Tensor cast(const at::Tensor& input) const;

  PrecisionSwap(const PrecisionSwap&) = delete;
  PrecisionSwap& operator=(const PrecisionSwap&) = delete;

 private:
  struct Swapped {
    at::Tensor parameter;
    at::Tensor full;  // its data
    // Kept alive: autograd holds it weakly.
    std::shared_ptr<torch::autograd::Node> accumulator;
    uintptr_t hook_key;
  };

  const std::vector<std::vector<at::Tensor>> parameters_;
  const at::ScalarType dtype_;
  Reducer& reducer_;
  std::vector<Swapped> swapped_;  // empty: full precision
};

}  // namespace brigade

#endif  // BRIGADE_DDP_PRECISION_SWAP_H_
