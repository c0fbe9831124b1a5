// The tensors of a sharded model for checkpoint/checkpoint.h.
//
//   save_checkpoint("checkpoint", checkpoint_model(*sharded), optimizer);
//   load_checkpoint("checkpoint", checkpoint_model(*sharded), optimizer);

#ifndef BRIGADE_FSDP_CHECKPOINT_MODEL_H_
#define BRIGADE_FSDP_CHECKPOINT_MODEL_H_

#include "brigade/checkpoint/checkpoint.h"
#include "brigade/fsdp/sharded_model.h"

namespace brigade {

// Collective. Parameters only. Valid until the next forward or backward.
CheckpointModel checkpoint_model(ShardedModel& model);

}  // namespace brigade

#endif  // BRIGADE_FSDP_CHECKPOINT_MODEL_H_
