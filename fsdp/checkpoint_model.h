// The tensors of a sharded model for checkpoint/checkpoint.h.
//
//   save_checkpoint("checkpoint", checkpoint_model(model.root()), optimizer);
//   load_checkpoint("checkpoint", checkpoint_model(model.root()), optimizer);

#ifndef BRIGADE_FSDP_CHECKPOINT_MODEL_H_
#define BRIGADE_FSDP_CHECKPOINT_MODEL_H_

#include <torch/nn/module.h>

#include "brigade/checkpoint/checkpoint.h"
#include "brigade/fsdp/sharded_root.h"

namespace brigade {

// Collective. Parameters only. Valid until the next forward or backward.
CheckpointModel checkpoint_model(ShardedRoot& root);

// A module with `Sharded` members that is not sharded, under the names that its
// parameters have in a sharded model's checkpoint.
CheckpointModel checkpoint_model(
    const torch::nn::Module& module,
    c10::intrusive_ptr<c10d::ProcessGroup> group = single_process_group());

}  // namespace brigade

#endif  // BRIGADE_FSDP_CHECKPOINT_MODEL_H_
