// Checkpoints of a model with what an optimizer keeps for each shard, whichever
// library's optimizer it is: LibTorch's (optimizer_state.h) or Python's. So one
// may load what the other has saved.
//
// Thread safety: as ShardedRoot, between forwards and backwards.

#ifndef BRIGADE_FSDP_CHECKPOINT_OPTIMIZER_CHECKPOINT_H_
#define BRIGADE_FSDP_CHECKPOINT_OPTIMIZER_CHECKPOINT_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "brigade/fsdp/checkpoint/checkpointed_model.h"
#include "brigade/fsdp/checkpoint/safetensors_header.h"

namespace brigade {

// Of a shard: "exp_avg" is of its sizes; a count, as "step", an I64 without
// dimensions, equal on all ranks.
struct FieldForm {
  std::string name;
  bool is_count = false;
};

struct SteppedShard {
  at::Tensor shard;               // or the parameter, if it is not sharded
  std::vector<FieldForm> fields;  // all that it has under its options
};

// What an optimizer keeps, and of what.
struct OptimizerForm {
  std::string type;  // "AdamW"
  // Fields are there before the first step of a shard.
  bool has_state_before_steps = false;
  std::vector<SteppedShard> stepped;
};

// By the shard's TensorImpl, by the field's name. None: it has no state.
using OptimizerFields =
    std::map<const void*, std::map<std::string, at::Tensor>>;

enum class CheckpointKind : uint8_t {
  kFile,    // of whole tensors, sharded_state.h
  kFolder,  // of shards, shard_files.h
};

// Collective. Errors: as save_whole() and save_shards() of what is kept;
// ValueError on all ranks alike for an error in place of `form`, one whose
// shards are not the model's, or optimizers of unlike types.
void save_checkpoint(const CheckpointedModel& model, CheckpointKind kind,
                     const std::string& path,
                     const absl::StatusOr<OptimizerForm>& form,
                     const OptimizerFields& fields,
                     SafetensorsMetadata metadata);

struct LoadedState {
  OptimizerFields fields;  // in memory of their own
  SafetensorsMetadata metadata;
};

// Collective: the parameters are loaded. Errors: as load_whole() and
// load_shards(), and save_checkpoint(); ValueError on all ranks alike if what
// was saved is another optimizer's, or other fields than `form` has. Nothing is
// changed then.
LoadedState load_checkpoint(const CheckpointedModel& model, CheckpointKind kind,
                            const std::string& path,
                            const absl::StatusOr<OptimizerForm>& form);

}  // namespace brigade

#endif  // BRIGADE_FSDP_CHECKPOINT_OPTIMIZER_CHECKPOINT_H_
