#include "brigade/fsdp/checkpoint_model.h"

#include <utility>
#include <vector>

#include "brigade/fsdp/fully_shard.h"

namespace brigade {

CheckpointModel checkpoint_model(ShardedRoot& root) {
  root.meet_peers();
  std::vector<CheckpointTensor> tensors;
  for (size_t u = 0; u < root.num_units(); ++u) {
    const Unit& unit = root.unit(u);
    for (const auto& segment : unit.segments) {
      for (size_t i = 0; i < segment->parameters().size(); ++i) {
        const NamedParameter& parameter = segment->parameters()[i];
        tensors.push_back(
            {.name = parameter.name,
             .shape = parameter.tensor.sizes().vec(),
             .strides = parameter.tensor.strides().vec(),
             .held = segment->shards()[i],
             .begin = segment->layout().range(i, segment->rank()).in_parameter,
             .ranks = unit.mesh ? unit.mesh->ranks : std::vector<int>()});
      }
    }
  }
  return {std::move(tensors), root.group()};
}

CheckpointModel checkpoint_model(const torch::nn::Module& module,
                                 c10::intrusive_ptr<c10d::ProcessGroup> group) {
  CheckpointModel model(module, std::move(group));
  for (CheckpointTensor& tensor : model.tensors) {
    tensor.name = without_unit_levels(std::move(tensor.name));
  }
  return model;
}

}  // namespace brigade
