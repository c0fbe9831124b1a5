#include "brigade/hooks/output_watch.h"

#include <utility>

namespace brigade {

void watch_outputs(std::span<const at::Tensor> outputs,
                   std::weak_ptr<void> owner,
                   std::function<void()> on_reached) {
  auto hook = [owner = std::move(owner), on_reached = std::move(on_reached)](
                  const at::Tensor& /*gradient*/) {
    if (std::shared_ptr<void> alive = owner.lock()) on_reached();
  };
  for (const at::Tensor& output : outputs) {
    if (output.defined() && output.grad_fn()) output.register_hook(hook);
  }
}

}  // namespace brigade
