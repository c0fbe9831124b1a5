#include "brigade/fsdp/backward_hooks.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <ranges>
#include <utility>

#include "brigade/hooks/autograd_hooks.h"

namespace brigade {
namespace {

struct Segment {
  std::weak_ptr<void> owner;
  std::function<void()> on_end;
  std::function<void()> on_abandoned;
};

std::mutex mutex;
std::map<int, std::vector<Segment>> open_segments;  // by backward; not empty

void end_segments(int backward, bool is_abandoned) {
  std::vector<Segment> segments;
  {
    const std::lock_guard lock(mutex);
    segments = std::move(open_segments[backward]);
    open_segments.erase(backward);
  }
  std::exception_ptr error;
  for (const Segment& segment : segments | std::views::reverse) {
    const auto owner = segment.owner.lock();
    if (!owner) continue;
    if (is_abandoned || error != nullptr) {
      segment.on_abandoned();
      continue;
    }
    try {
      segment.on_end();
    } catch (...) {
      error = std::current_exception();
    }
  }
  if (error != nullptr) std::rethrow_exception(error);
}

ErrorTaker take_error = nullptr;

// Returns the tensor's accumulator if it exists. Torch's optimizers in backward
// register hooks there.
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
      if (is_gradient_hook(*hook)) continue;  // brigade's own
      attempt([&] { (*hook)({}, {tensor.grad()}); });
    }
  }
  if (first != nullptr) std::rethrow_exception(first);
}

}  // namespace

void end_with_backward(std::weak_ptr<void> owner, std::function<void()> on_end,
                       std::function<void()> on_abandoned) {
  const int backward = running_backward_id();
  {
    const std::lock_guard lock(mutex);
    std::vector<Segment>& segments = open_segments[backward];
    segments.push_back({.owner = std::move(owner),
                        .on_end = std::move(on_end),
                        .on_abandoned = std::move(on_abandoned)});
    if (segments.size() > 1) return;
  }
  const auto watched = std::make_shared<char>();
  watch_backward_end(
      watched, [watched, backward] { end_segments(backward, false); },
      [backward] { end_segments(backward, true); });
}

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

void call_hooks_after_backward(std::vector<at::Tensor> tensors) {
  if (running_backward_id() < 0) return call_hooks(tensors);
  const auto shared =
      std::make_shared<std::vector<at::Tensor>>(std::move(tensors));
  watch_backward_end(
      shared, [shared] { call_hooks(*shared); }, [] {});
}

}  // namespace brigade
