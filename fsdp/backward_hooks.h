// Ends of sharded models' backwards, and users' post-accumulate-grad hooks,
// which run on sharded gradients.
//
// Thread safety: call from inside a backward. Call set_error_taker() before
// any.

#ifndef BRIGADE_FSDP_BACKWARD_HOOKS_H_
#define BRIGADE_FSDP_BACKWARD_HOOKS_H_

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>

#include <exception>
#include <functional>
#include <memory>
#include <vector>

namespace brigade {

// Registers callbacks as watch_backward_end() does. If several models take part
// in the backward, the last one to register ends first. So a failed rank
// reports in the segment in which its peers wait, not in an outer one that they
// end later. If `on_end` throws, the other models are abandoned, and
// backward() throws it.
void end_with_backward(std::weak_ptr<void> owner, std::function<void()> on_end,
                       std::function<void()> on_abandoned);

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
// error state before the next call into Python.
using ErrorTaker = void (*)(std::exception& error);
void set_error_taker(ErrorTaker taker);

}  // namespace brigade

#endif  // BRIGADE_FSDP_BACKWARD_HOOKS_H_
