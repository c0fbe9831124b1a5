#include "brigade/hooks/gradient_hooks.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <memory>
#include <utility>

namespace brigade {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::AutogradMeta;
using torch::autograd::FunctionPreHook;
using torch::autograd::Node;
using torch::autograd::variable_list;

constexpr size_t kCacheLineBytes = 64;

// All of an object that will be written to. It may be null.
template <typename T>
void prefetch(const T* object) {
  const char* const begin = reinterpret_cast<const char*>(object);
  for (size_t offset = 0; offset < sizeof(T); offset += kCacheLineBytes) {
    __builtin_prefetch(begin + offset, /*write=*/1);
  }
}

}  // namespace

void refuse_compiled_autograd() {
  TORCH_CHECK(
      false,
      "brigade: compiled autograd can't trace a backward whose gradients a "
      "reducer reduces.\nSet torch._dynamo.config.optimize_ddp = "
      "\"python_reducer\" before wrapping the model, or leave compiled "
      "autograd off.");
}

// Gradients become ready in much the same order in every backward, each long
// after its accumulator was last used, which is cold then. So a hook remembers
// which one was called after it, and prefetches for that one.
class ReadyHook final : public torch::autograd::FunctionPostHook {
 public:
  ReadyHook(GradientHooks& owner, VariableIndex variable,
            const Node* accumulator, const at::Tensor& parameter)
      : owner_(owner),
        variable_(variable),
        accumulator_(static_cast<const AccumulateGrad*>(accumulator)),
        parameter_(parameter.unsafeGetTensorImpl()),
        autograd_meta_(torch::autograd::impl::get_autograd_meta(parameter)) {}

  variable_list operator()(const variable_list& outputs,
                           const variable_list& inputs) override {
    prefetch_next();
    owner_.listener_(variable_, inputs.at(0).defined() || is_taken_);
    return outputs;  // empty: an accumulator has no successors
  }

  void compiled_args(
      torch::dynamo::autograd::CompiledNodeArgs&) const override {
    refuse_compiled_autograd();
  }

  void take(const at::Tensor& gradient) {
    is_taken_ = gradient.defined();
    if (is_taken_) owner_.sink_(variable_, gradient);
  }

 private:
  // Backwards of several threads may mix up what is remembered, which costs
  // them no more than that: hooks live as long as one another.
  void prefetch_next() {
    ReadyHook* const before =
        owner_.last_called_.load(std::memory_order_relaxed);
    owner_.last_called_.store(this, std::memory_order_relaxed);
    if (before != nullptr) {
      before->next_.store(this, std::memory_order_relaxed);
    }
    const ReadyHook* const next = next_.load(std::memory_order_relaxed);
    if (next == nullptr) return;
    prefetch(next->accumulator_);
    prefetch(next->parameter_);
    prefetch(next->autograd_meta_);
    // Read by the next one, as its own were read here.
    const ReadyHook* const second = next->next_.load(std::memory_order_relaxed);
    if (second != nullptr) prefetch(second);
  }

  GradientHooks& owner_;
  const VariableIndex variable_;
  // For their addresses only.
  const AccumulateGrad* const accumulator_;
  const at::TensorImpl* const parameter_;
  const AutogradMeta* const autograd_meta_;

  std::atomic<ReadyHook*> next_ = nullptr;
  bool is_taken_ = false;  // by the sink, in the present call
};

// An accumulator that gets an undefined gradient leaves `.grad` alone and calls
// its post-hooks.
class TakingHook final : public FunctionPreHook {
 public:
  // REQUIRES: `ready`, of the same accumulator, outlives this object.
  explicit TakingHook(ReadyHook& ready) : ready_(ready) {}

  variable_list operator()(const variable_list& gradients) override {
    ready_.take(gradients.at(0));
    return {at::Tensor()};
  }

  void compiled_args(
      torch::dynamo::autograd::CompiledNodeArgs&) const override {
    refuse_compiled_autograd();
  }

 private:
  ReadyHook& ready_;
};

bool is_gradient_hook(const torch::autograd::FunctionPostHook& hook) {
  return dynamic_cast<const ReadyHook*>(&hook) != nullptr;
}

GradientHooks::GradientHooks(std::span<const std::vector<at::Tensor>> replicas,
                             Listener listener, Sink sink)
    : listener_(std::move(listener)), sink_(std::move(sink)) {
  try {
    for (size_t r = 0; r < replicas.size(); ++r) {
      for (size_t i = 0; i < replicas[r].size(); ++i) {
        add(replicas[r][i], {.replica = r, .parameter = i});
      }
    }
  } catch (...) {
    remove();
    throw;
  }
}

GradientHooks::~GradientHooks() { remove(); }

void GradientHooks::add(const at::Tensor& parameter, VariableIndex variable) {
  NodePtr accumulator = torch::autograd::impl::grad_accumulator(parameter);
  auto hook = std::make_unique<ReadyHook>(*this, variable, accumulator.get(),
                                          parameter);
  ReadyHook& ready = *hook;
  const uintptr_t key = accumulator->add_post_hook(std::move(hook));
  Registration& registration = registrations_.emplace_back(
      Registration{std::move(accumulator), key, nullptr});
  if (!sink_) return;
  auto taking = std::make_unique<TakingHook>(ready);
  registration.taking = taking.get();
  registration.accumulator->add_pre_hook(std::move(taking));
}

void GradientHooks::remove() {
  for (const auto& [accumulator, key, taking] : registrations_) {
    // Autograd has a call for this for post-hooks only.
    std::erase_if(
        accumulator->pre_hooks(),
        [removed = taking](const auto& hook) { return hook.get() == removed; });
    accumulator->del_post_hook(key);
  }
  registrations_.clear();
  last_called_ = nullptr;
}

std::optional<VariableIndex> GradientHooks::first_detached(
    std::span<const std::vector<at::Tensor>> replicas) const {
  if (registrations_.empty()) return std::nullopt;
  auto registration = registrations_.begin();
  for (size_t r = 0; r < replicas.size(); ++r) {
    for (size_t i = 0; i < replicas[r].size(); ++i, ++registration) {
      // Compares without looking at the accumulator, which may be cold.
      const WeakNodePtr& current =
          torch::autograd::impl::get_autograd_meta(replicas[r][i])
              ->grad_accumulator_;
      if (!points_to(current, registration->accumulator)) {
        return VariableIndex{.replica = r, .parameter = i};
      }
    }
  }
  return std::nullopt;
}

std::vector<Node*> GradientHooks::accumulators() const {
  std::vector<Node*> accumulators;
  accumulators.reserve(registrations_.size());
  for (const Registration& registration : registrations_) {
    accumulators.push_back(registration.accumulator.get());
  }
  return accumulators;
}

}  // namespace brigade
