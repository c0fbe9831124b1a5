#include "brigade/hooks/gradient_hooks.h"

#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "brigade/hooks/compiled_autograd.h"
#include "brigade/hooks/prefetch.h"

namespace brigade {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

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

void GradientHooks::add(std::span<const std::vector<at::Tensor>> replicas,
                        GradientSink* sink, size_t bytes_per_hook,
                        c10::function_ref<MakeHook> make_hook) {
  size_t num_variables = 0;
  for (const std::vector<at::Tensor>& replica : replicas) {
    num_variables += replica.size();
  }
  registrations_.reserve(num_variables);
  hooks_ = std::make_unique_for_overwrite<std::byte[]>(num_variables *
                                                       bytes_per_hook);
  std::byte* place = hooks_.get();
  try {
    for (size_t r = 0; r < replicas.size(); ++r) {
      for (size_t i = 0; i < replicas[r].size(); ++i) {
        prefetch_after(replicas[r], i);
        NodePtr accumulator =
            torch::autograd::impl::grad_accumulator(replicas[r][i]);
        std::unique_ptr<ReadyHook> hook =
            make_hook(place, VariableIndex{.replica = r, .parameter = i},
                      accumulator.get(), replicas[r][i]);
        ReadyHook& ready = *hook;
        const uintptr_t key = accumulator->add_post_hook(std::move(hook));
        Registration& registration = registrations_.emplace_back(
            Registration{std::move(accumulator), key, nullptr});
        place += bytes_per_hook;
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
