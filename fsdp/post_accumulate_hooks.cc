#include "brigade/fsdp/post_accumulate_hooks.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <utility>

#include "brigade/hooks/backward_end.h"
#include "brigade/hooks/gradient_hooks.h"

namespace brigade {
namespace {

ErrorTaker take_error = nullptr;

// Of the accumulator that the tensor would have in a backward, if anybody has
// asked for it: torch's optimizers in backward put theirs there.
auto accumulator_of(const at::Tensor& tensor) {
  return torch::autograd::impl::try_get_grad_accumulator(tensor);
}

void call_hooks(const std::vector<at::Tensor>& tensors) {
  std::exception_ptr first;
  const auto attempt = [&](const auto& call) {
    try {
      call();
    } catch (std::exception& error) {
      if (take_error != nullptr) take_error(error);
      if (first == nullptr) first = std::current_exception();
    }
  };
  for (const at::Tensor& tensor : tensors) {
    const auto& hooks = torch::autograd::impl::post_acc_grad_hooks(tensor);
    if (hooks != nullptr) attempt([&] { (*hooks)(tensor); });
    const auto accumulator = accumulator_of(tensor);
    if (!accumulator) continue;
    for (const auto& hook : accumulator->post_hooks()) {
      if (is_gradient_hook(*hook)) continue;  // not a user's
      attempt([&] { (*hook)({}, {tensor.grad()}); });
    }
  }
  if (first != nullptr) std::rethrow_exception(first);
}

}  // namespace

void set_error_taker(ErrorTaker taker) { take_error = taker; }

HiddenPostAccumulateHooks::HiddenPostAccumulateHooks(
    const std::vector<at::Tensor>& leaves) {
  for (const at::Tensor& leaf : leaves) {
    auto& hook = torch::autograd::impl::post_acc_grad_hooks(leaf);
    if (hook != nullptr) hidden_.push_back({leaf, std::move(hook)});
  }
}

HiddenPostAccumulateHooks::~HiddenPostAccumulateHooks() {
  for (Hidden& hidden : hidden_) {
    auto& hook = torch::autograd::impl::post_acc_grad_hooks(hidden.leaf);
    if (hook == nullptr) hook = std::move(hidden.hook);
  }
}

bool has_post_accumulate_hooks(const at::Tensor& tensor) {
  if (torch::autograd::impl::post_acc_grad_hooks(tensor) != nullptr) {
    return true;
  }
  const auto accumulator = accumulator_of(tensor);
  return accumulator &&
         std::ranges::any_of(accumulator->post_hooks(), [](const auto& hook) {
           return !is_gradient_hook(*hook);
         });
}

void call_hooks_behind_backward(std::vector<at::Tensor> tensors) {
  if (running_backward_id() < 0) return call_hooks(tensors);
  const auto shared =
      std::make_shared<const std::vector<at::Tensor>>(std::move(tensors));
  const auto owner = std::make_shared<char>();
  watch_backward_end(
      owner, [shared, owner] { call_hooks(*shared); }, [] {});
}

}  // namespace brigade
