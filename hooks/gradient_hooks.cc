#include "brigade/hooks/gradient_hooks.h"

#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "brigade/hooks/prefetch.h"

namespace brigade {
namespace {

using torch::autograd::Node;

// Autograd has a call for this for post-hooks only.
void remove_pre_hook(Node& node,
                     const torch::autograd::FunctionPreHook* removed) {
  std::erase_if(node.pre_hooks(),
                [&](const auto& hook) { return hook.get() == removed; });
}

}  // namespace

void GradientHooks::add(std::span<const std::vector<at::Tensor>> replicas,
                        size_t bytes_per_hook,
                        c10::function_ref<MakeReady> make_ready,
                        const c10::function_ref<MakeTaking>* make_taking) {
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
            make_ready(place, VariableIndex{.replica = r, .parameter = i},
                       accumulator.get(), replicas[r][i]);
        ReadyHook& ready = *hook;
        const uintptr_t key = accumulator->add_post_hook(std::move(hook));
        Registration& registration = registrations_.emplace_back(
            Registration{std::move(accumulator), key, nullptr});
        place += bytes_per_hook;
        if (make_taking == nullptr) continue;
        auto taking = (*make_taking)(ready);
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
