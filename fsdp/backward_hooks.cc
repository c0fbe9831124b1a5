#include "brigade/fsdp/backward_hooks.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "brigade/hooks/backward_end.h"
#include "brigade/hooks/gradient_hooks.h"

namespace brigade {
namespace {

// The open segments of one backward.
class OpenSegments {
 public:
  struct Segment {
    std::weak_ptr<void> owner;
    std::function<void()> on_end;
    std::function<void()> on_abandoned;
  };

  void add(Segment segment) {
    const std::lock_guard lock(mutex_);
    open_.push_back(std::move(segment));
  }

  void end() {
    for_each_from_the_last([this](const Segment& segment) {
      try {
        segment.on_end();
      } catch (...) {
        abandon();
        throw;
      }
    });
  }

  void abandon() {
    for_each_from_the_last(
        [](const Segment& segment) { segment.on_abandoned(); });
  }

 private:
  template <typename Use>
  void for_each_from_the_last(const Use& use) {
    std::unique_lock lock(mutex_);
    while (!open_.empty()) {
      const Segment last = std::move(open_.back());
      open_.pop_back();
      lock.unlock();
      if (const auto owner = last.owner.lock()) use(last);
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::vector<Segment> open_;
};

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

void end_with_backward(std::weak_ptr<void> owner, std::function<void()> on_end,
                       std::function<void()> on_abandoned) {
  static std::mutex mutex;
  static std::map<int, std::weak_ptr<OpenSegments>> of_backwards;
  std::shared_ptr<OpenSegments> segments;
  bool is_first = false;
  {
    const std::lock_guard lock(mutex);
    std::erase_if(of_backwards,
                  [](const auto& item) { return item.second.expired(); });
    std::weak_ptr<OpenSegments>& of_this = of_backwards[running_backward_id()];
    segments = of_this.lock();
    is_first = segments == nullptr;
    if (is_first) of_this = segments = std::make_shared<OpenSegments>();
  }
  segments->add({.owner = std::move(owner),
                 .on_end = std::move(on_end),
                 .on_abandoned = std::move(on_abandoned)});
  if (!is_first) return;
  watch_backward_end(
      segments, [segments] { segments->end(); },
      [segments] { segments->abandon(); });
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
