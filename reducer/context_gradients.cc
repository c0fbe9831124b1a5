#include "brigade/reducer/context_gradients.h"

#include <torch/csrc/distributed/autograd/context/context.h>

#include <utility>

namespace brigade {

using torch::distributed::autograd::ThreadLocalDistAutogradContext;

ContextGradients::~ContextGradients() {
  for (auto& [key, lent] : lent_) {
    lent.parameter.mutable_grad() = std::move(lent.own_gradient);
  }
}

void ContextGradients::take(const at::Tensor& parameter,
                            const MemoryRanges& buckets) {
  if (!context_) {
    context_ = ThreadLocalDistAutogradContext::getContextPtr();
    if (!context_) return;
  }
  at::Tensor own = parameter.grad();
  if (own.defined() && buckets.contains(own)) own = own.clone();
  lent_.try_emplace(parameter.unsafeGetTensorImpl(),
                    Lent{.parameter = parameter, .own_gradient = own});
  context_->runGradCallbackForVariable(parameter,
                                       [&parameter](at::Tensor& gradient) {
                                         parameter.mutable_grad() = gradient;
                                         return false;
                                       });
}

void ContextGradients::write_back() {
  for (auto& [key, lent] : std::exchange(lent_, {})) {
    context_->runGradCallbackForVariable(
        lent.parameter, [&parameter = lent.parameter](at::Tensor& gradient) {
          if (parameter.grad().defined()) gradient = parameter.grad();
          return true;
        });
    lent.parameter.mutable_grad() = std::move(lent.own_gradient);
  }
}

}  // namespace brigade
