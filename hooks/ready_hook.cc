#include "brigade/hooks/ready_hook.h"

#include "brigade/hooks/compiled_autograd.h"
#include "brigade/hooks/prefetch.h"

namespace brigade {

ReadyHook::ReadyHook(VariableIndex variable,
                     const torch::autograd::Node* accumulator,
                     const at::Tensor& parameter,
                     std::atomic<ReadyHook*>& last_called)
    : variable_(variable),
      accumulator_(
          static_cast<const torch::autograd::AccumulateGrad*>(accumulator)),
      parameter_(parameter.unsafeGetTensorImpl()),
      autograd_meta_(torch::autograd::impl::get_autograd_meta(parameter)),
      last_called_(last_called) {}

void ReadyHook::compiled_args(
    torch::dynamo::autograd::CompiledNodeArgs&) const {
  refuse_compiled_autograd();
}

void ReadyHook::prefetch_next() {
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

}  // namespace brigade
