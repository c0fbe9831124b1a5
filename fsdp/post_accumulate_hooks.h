// Hooks that users put on a tensor to run behind accumulation, by
// Tensor.register_post_accumulate_grad_hook or on its accumulator, of tensors
// whose `.grad` is written elsewhere than in autograd.
//
// Thread safety: call from inside a backward, set_error_taker() before any.

#ifndef BRIGADE_FSDP_POST_ACCUMULATE_HOOKS_H_
#define BRIGADE_FSDP_POST_ACCUMULATE_HOOKS_H_

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>

#include <exception>
#include <memory>
#include <vector>

namespace brigade {

// Takes the hooks of leaves away from autograd until it is destroyed, which
// would call them with whole gradients of this rank.
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

bool has_post_accumulate_hooks(const at::Tensor& tensor);

// Calls them where the running backward ends, outside of its caller's locks, or
// at once if none is running:
// those of one tensor after the other. What the first that fails throws comes
// out of backward() behind all others' hooks. Not called if the backward fails
// before.
void call_hooks_behind_backward(std::vector<at::Tensor> tensors);

// Is shown each error of a hook before others are called: those of Python are
// to be taken from where the next call into Python would find them.
using ErrorTaker = void (*)(std::exception& error);
void set_error_taker(ErrorTaker taker);

}  // namespace brigade

#endif  // BRIGADE_FSDP_POST_ACCUMULATE_HOOKS_H_
