// Checkpoints of which each rank writes and reads its own part: nothing is
// gathered, and all ranks' disks work at once.
//
//   save_shards(model.root(), optimizer, "checkpoint");  // optimizer_state.h
//   ...
//   load_shards(model.root(), optimizer, "checkpoint");
//
// A folder holds one checkpoint: `shard-<r>-of-<n>.<id>.safetensors` of each
// rank r of a row of the mesh, or of each rank if units have meshes of their
// own, and `index.safetensors`, which has no tensors but says, with a checksum,
// which files belong together and what lies where (shard_index.h). A save
// writes files of a new id and then replaces the index: until then the
// checkpoint before is whole, and afterwards its files go. What a save that was
// cut off left there goes with the next.
//
// Loaded with as many shards of the same units, each rank reads its own file.
// In any other case each reads what it needs of several.
//
// Thread safety: as ShardedRoot, between forwards and backwards.

#ifndef BRIGADE_FSDP_CHECKPOINT_SHARD_FILES_H_
#define BRIGADE_FSDP_CHECKPOINT_SHARD_FILES_H_

#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "brigade/fsdp/checkpoint/checkpointed_model.h"
#include "brigade/fsdp/checkpoint/safetensors_header.h"
#include "brigade/fsdp/checkpoint/shard_index.h"
#include "brigade/fsdp/checkpoint/sharded_tensors.h"
#include "brigade/fsdp/sharded_root.h"

namespace brigade {

// Collective. `folder`: one that all ranks see; made if need be. Its files of
// other ids are removed, so give it to nothing else. Errors: ValueError on all
// ranks alike if one can't write, one name stands for parameters on several
// meshes, or the model is not sharded; the checkpoint before is intact then,
// unless the message says that the new one has taken its place.
void save_shards(const CheckpointedModel& model, const std::string& folder,
                 std::span<const ShardedTensors> tensors,
                 const SafetensorsMetadata& metadata = {});
void save_shards(const CheckpointedModel& model, const std::string& folder);

// Collective. Returns the metadata. All is read twice: first to compare it with
// its checksum, of which one tensor at a time is in memory. Errors: ValueError
// on all ranks alike if a file that is needed is damaged or missing, or a
// tensor is, or has another shape, dtype or order in memory; no tensor is
// changed then. Or if a disk fails when ranks have seen that all is well; the
// error says that some tensors are changed.
SafetensorsMetadata load_shards(const CheckpointedModel& model,
                                const std::string& folder,
                                std::span<const ShardedTensors> tensors);
SafetensorsMetadata load_shards(const CheckpointedModel& model,
                                const std::string& folder);

struct ShardsContents {
  ShardIndex index;
  SafetensorsMetadata metadata;
};

// Errors: as SafetensorsReader::open(), and DataLoss if it is no index.
absl::StatusOr<ShardsContents> read_shards_index(const std::string& folder);

}  // namespace brigade

#endif  // BRIGADE_FSDP_CHECKPOINT_SHARD_FILES_H_
