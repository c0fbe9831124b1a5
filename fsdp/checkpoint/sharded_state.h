// Saves what ranks hold parts of as whole tensors, in one file, and loads it on
// any number of ranks.
//
//   save_whole(root, "model.safetensors");
//   ...
//   load_whole(root, "model.safetensors");  // of any number of ranks, or of a
//                                           // program that does not shard
//
// Tensors have the names, shapes and dtypes of the parameters. What an
// optimizer keeps for each shard goes beside them, under names of its own:
// optimizer_state.h does so for LibTorch's optimizers, and for others
//
//   const std::vector<ShardedTensors> saved = {
//       parameters_of_shards(),
//       {.suffix = ".momentum", .of = [&](const at::Tensor& shard) {
//          return momentum_of(optimizer, shard);
//        }}};
//
// At most one unit is whole in memory at a time, on each rank, and where a file
// is loaded, one tensor or a part of it. A file takes the place of an older one
// when all of it is written (fsdp/checkpoint/safetensors_file.h).
//
// Thread safety: as ShardedRoot, between forwards and backwards.

#ifndef BRIGADE_FSDP_CHECKPOINT_SHARDED_STATE_H_
#define BRIGADE_FSDP_CHECKPOINT_SHARDED_STATE_H_

#include <span>
#include <string>

#include "brigade/fsdp/checkpoint/checkpointed_model.h"
#include "brigade/fsdp/checkpoint/safetensors_file.h"
#include "brigade/fsdp/checkpoint/sharded_tensors.h"

namespace brigade {

// Collective. Rank 0 writes. Errors: ValueError on all ranks alike if it can't,
// or if a dtype is none of the format's; NotImplementedError if units are on
// meshes of fewer ranks than the root; the file is as before then.
void save_whole(const CheckpointedModel& model, const std::string& path,
                std::span<const ShardedTensors> tensors,
                const SafetensorsMetadata& metadata = {});
void save_whole(const CheckpointedModel& model, const std::string& path);

// Collective. Each rank reads its parts, and gets the file's metadata. Errors:
// ValueError on all ranks alike if the file is damaged, lacks a tensor, or has
// another shape or dtype; no tensor is changed then. Or if the disk fails when
// ranks have seen that all is well; the error says that some tensors are
// changed.
SafetensorsMetadata load_whole(const CheckpointedModel& model,
                               const std::string& path,
                               std::span<const ShardedTensors> tensors);
SafetensorsMetadata load_whole(const CheckpointedModel& model,
                               const std::string& path);

}  // namespace brigade

#endif  // BRIGADE_FSDP_CHECKPOINT_SHARDED_STATE_H_
