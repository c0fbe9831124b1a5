#include "brigade/fsdp/checkpoint_model.h"

#include <utility>
#include <vector>

#include "brigade/fsdp/segmented_model.h"

namespace brigade {

CheckpointModel checkpoint_model(ShardedModel& of) {
  auto& model = dynamic_cast<SegmentedModel&>(of);
  model.meet_peers();
  std::vector<CheckpointTensor> tensors;
  for (size_t unit = 0; unit < model.units().size(); ++unit) {
    model.written(unit);  // loading writes to the shards themselves
    for (const auto& flat : model.units()[unit].flats) {
      for (const UnitParameter& parameter : flat->parameters()) {
        const Shard& shard = *shard_of(parameter.tensor);
        tensors.push_back(
            {.name = parameter.name,
             .shape = parameter.tensor.sizes().vec(),
             .strides = parameter.tensor.strides().vec(),
             .held = shard.local,
             .begin = shard.offset,
             .ranks = model.units()[unit].mesh ? model.units()[unit].mesh->ranks
                                               : std::vector<int>(),
             .parameter = parameter.tensor,
             .part_of = [](const at::Tensor& like_parameter) {
               const Shard* const part = shard_of(like_parameter);
               TORCH_CHECK_VALUE(part != nullptr,
                                 "the optimizer has whole state of a sharded "
                                 "parameter.\nMake the optimizer anew.");
               return part->local;
             }});
      }
    }
  }
  return {std::move(tensors), model.group()};
}

}  // namespace brigade
