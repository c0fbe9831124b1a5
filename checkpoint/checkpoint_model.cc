#include "brigade/checkpoint/checkpoint_model.h"

#include <algorithm>

namespace brigade {

CheckpointTensor unsharded_tensor(std::string name, const at::Tensor& tensor) {
  return {
      .name = std::move(name), .shape = tensor.sizes().vec(), .held = tensor};
}

CheckpointModel::CheckpointModel(const torch::nn::Module& module,
                                 c10::intrusive_ptr<c10d::ProcessGroup> group)
    : group(std::move(group)) {
  const auto add = [&](const auto& named, bool is_optional) {
    for (const auto& item : named) {
      const bool is_tied =
          std::ranges::any_of(tensors, [&](const CheckpointTensor& known) {
            return known.held.is_same(item.value());
          });
      if (is_tied) continue;
      tensors.push_back(unsharded_tensor(item.key(), item.value()));
      tensors.back().is_optional = is_optional;
    }
  };
  add(module.named_parameters(), /*is_optional=*/false);
  // A sharded model's checkpoint has no buffers.
  add(module.named_buffers(), /*is_optional=*/true);
}

}  // namespace brigade
