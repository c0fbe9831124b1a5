#include "brigade/hooks/gradient_hooks.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "brigade/hooks/compiled_autograd.h"
#include "brigade/hooks/prefetch.h"

namespace brigade {
namespace {

using torch::autograd::AutogradMeta;
using torch::autograd::Node;
using torch::autograd::variable_list;

}  // namespace

// Gradients become ready in much the same order in every backward, each long
// after its accumulator was last used: an accumulator outlives its graphs here,
// and what autograd would make anew, in memory it has just freed, is cold. So a
// hook remembers which one was called after it, and prefetches for that one.
class ReadyHook final : public torch::autograd::FunctionPostHook {
 public:
  // Hooks lie side by side where GradientHooks says. An accumulator, which owns
  // its hook, ends it, but does not free it.
  static void* operator new(size_t /*size*/, void* place) { return place; }
  static void operator delete(void* /*hook*/, void* /*place*/) {}
  static void operator delete(void* /*hook*/) {}

  // REQUIRES: `last_called` outlives this object.
  ReadyHook(GradientListener& listener, VariableIndex variable,
            const Node* accumulator, const at::Tensor& parameter,
            std::atomic<ReadyHook*>& last_called)
      : listener_(listener),
        variable_(variable),
        accumulator_(
            static_cast<const torch::autograd::AccumulateGrad*>(accumulator)),
        parameter_(parameter.unsafeGetTensorImpl()),
        autograd_meta_(torch::autograd::impl::get_autograd_meta(parameter)),
        last_called_(last_called) {}

  variable_list operator()(const variable_list& outputs,
                           const variable_list& inputs) override {
    prefetch_next();
    listener_.on_gradient_ready(variable_, inputs.at(0).defined() || is_taken_);
    return outputs;  // empty: an accumulator has no successors
  }

  void compiled_args(
      torch::dynamo::autograd::CompiledNodeArgs&) const override {
    refuse_compiled_autograd();
  }

  VariableIndex variable() const { return variable_; }

  // Whether a sink has the gradient that the accumulator is called with.
  void set_taken(bool is_taken) { is_taken_ = is_taken; }

 private:
  // Backwards of several threads may mix up what is remembered, which costs
  // them no more than that: hooks live as long as one another.
  void prefetch_next() {
    ReadyHook* const before = last_called_.load(std::memory_order_relaxed);
    last_called_.store(this, std::memory_order_relaxed);
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

  GradientListener& listener_;
  const VariableIndex variable_;
  // For their addresses only.
  const torch::autograd::AccumulateGrad* const accumulator_;
  const at::TensorImpl* const parameter_;
  const AutogradMeta* const autograd_meta_;

  std::atomic<ReadyHook*>& last_called_;
  std::atomic<ReadyHook*> next_ = nullptr;

  bool is_taken_ = false;  // by a sink, in the present call
};

namespace {

// Gives the sink what its accumulator would accumulate. An accumulator that
// gets an undefined gradient leaves `.grad` alone and calls its hooks.
class TakingHook final : public torch::autograd::FunctionPreHook {
 public:
  // REQUIRES: `ready`, of the same accumulator, outlives this object.
  TakingHook(GradientSink& sink, ReadyHook& ready)
      : sink_(sink), ready_(ready) {}

  variable_list operator()(const variable_list& gradients) override {
    const at::Tensor& gradient = gradients.at(0);
    ready_.set_taken(gradient.defined());
    if (gradient.defined()) sink_.take(ready_.variable(), gradient);
    return {at::Tensor()};
  }

  void compiled_args(
      torch::dynamo::autograd::CompiledNodeArgs&) const override {
    refuse_compiled_autograd();
  }

 private:
  GradientSink& sink_;
  ReadyHook& ready_;
};

// Autograd has a call for this for post-hooks only.
void remove_pre_hook(Node& node,
                     const torch::autograd::FunctionPreHook* removed) {
  std::erase_if(node.pre_hooks(),
                [&](const auto& hook) { return hook.get() == removed; });
}

}  // namespace

GradientHooks::GradientHooks(std::span<const std::vector<at::Tensor>> replicas,
                             GradientListener& listener, GradientSink* sink) {
  size_t num_variables = 0;
  for (const std::vector<at::Tensor>& replica : replicas) {
    num_variables += replica.size();
  }
  registrations_.reserve(num_variables);
  static_assert(alignof(ReadyHook) <= __STDCPP_DEFAULT_NEW_ALIGNMENT__);
  hooks_ = std::make_unique_for_overwrite<std::byte[]>(num_variables *
                                                       sizeof(ReadyHook));
  std::byte* place = hooks_.get();
  try {
    for (size_t r = 0; r < replicas.size(); ++r) {
      for (size_t i = 0; i < replicas[r].size(); ++i) {
        prefetch_after(replicas[r], i);
        NodePtr accumulator =
            torch::autograd::impl::grad_accumulator(replicas[r][i]);
        std::unique_ptr<ReadyHook> hook(new (place) ReadyHook(
            listener, VariableIndex{.replica = r, .parameter = i},
            accumulator.get(), replicas[r][i], last_called_));
        ReadyHook& ready = *hook;
        const uintptr_t key = accumulator->add_post_hook(std::move(hook));
        Registration& registration = registrations_.emplace_back(
            Registration{std::move(accumulator), key, nullptr});
        place += sizeof(ReadyHook);
        if (sink == nullptr) continue;
        auto taking = std::make_unique<TakingHook>(*sink, ready);
        registration.taking = taking.get();
        registration.accumulator->add_pre_hook(std::move(taking));
      }
    }
  } catch (...) {
    remove();  // before their memory goes
    throw;
  }
}

GradientHooks::~GradientHooks() { remove(); }

void GradientHooks::remove() {
  for (Registration& registration : registrations_) {
    if (registration.taking != nullptr) {
      remove_pre_hook(*registration.accumulator, registration.taking);
    }
    registration.accumulator->del_post_hook(registration.key);
  }
  registrations_.clear();
  hooks_.reset();
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

std::vector<torch::autograd::Node*> GradientHooks::accumulators() const {
  std::vector<torch::autograd::Node*> accumulators;
  accumulators.reserve(registrations_.size());
  for (const Registration& registration : registrations_) {
    accumulators.push_back(registration.accumulator.get());
  }
  return accumulators;
}

}  // namespace brigade
