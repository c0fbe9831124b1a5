// Sharding's part in a backward of autograd: where it ends, and the users'
// hooks after accumulation, which run with the shards' gradients.
//
// Thread safety: call from inside a backward; set_error_taker() before any.

#ifndef BRIGADE_FSDP_BACKWARD_HOOKS_H_
#define BRIGADE_FSDP_BACKWARD_HOOKS_H_

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>

#include <exception>
#include <functional>
#include <memory>
#include <vector>

namespace brigade {

// As watch_backward_end() (hooks/autograd_hooks.h), for several models that
// take part in one backward: the one that began last ends first. So a rank that
// fails tells its peers in the segment in which they wait for it, and not in an
// outer one, whose end they reach later. If `on_end` throws, the models that
// began earlier are abandoned, and the exception comes out of backward().
void end_with_backward(std::weak_ptr<void> owner, std::function<void()> on_end,
                       std::function<void()> on_abandoned);

// Takes the hooks that users have registered on leaves, by
// Tensor.register_post_accumulate_grad_hook, away from autograd until it is
// destroyed. Autograd would call them with unsharded gradients of this rank.
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

// Also those on the tensor's accumulator.
bool has_post_accumulate_hooks(const at::Tensor& tensor);

// Calls them at the end of the running backward, outside of its caller's locks,
// or at once if none is running. All are called; then the first error comes out
// of backward(). Not called if the backward fails before.
void call_hooks_after_backward(std::vector<at::Tensor> tensors);

// Is shown each error of a hook before others are called: an error of Python
// must be taken from where the next call into Python would find it.
using ErrorTaker = void (*)(std::exception& error);
void set_error_taker(ErrorTaker taker);

}  // namespace brigade

#endif  // BRIGADE_FSDP_BACKWARD_HOOKS_H_
