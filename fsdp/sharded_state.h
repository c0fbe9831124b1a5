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
//
//   const std::vector<ShardedTensors> saved = {
//       parameters_of_shards(),
//       {.suffix = ".momentum", .of = [&](const at::Tensor& shard) {
//          return momentum_of(optimizer, shard);
//        }}};
//
// At most one unit is whole in memory at a time, on each rank. A file takes the
// place of an older one when all of it is written (fsdp/safetensors_file.h).
//
// Thread safety: as ShardedRoot, between forwards and backwards.

#ifndef BRIGADE_FSDP_SHARDED_STATE_H_
#define BRIGADE_FSDP_SHARDED_STATE_H_

#include <ATen/core/Tensor.h>

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "brigade/fsdp/safetensors_file.h"
#include "brigade/fsdp/sharded_root.h"

namespace brigade {

// A tensor for each shard, of its sizes: "weight" + suffix.
struct ShardedTensors {
  std::string suffix;
  // Of a shard, of ShardedRoot::shards(); undefined: it has none, on all ranks.
  std::function<at::Tensor(const at::Tensor& shard)> of;
};

// The shards themselves.
ShardedTensors parameters_of_shards();

// Collective. Rank 0 writes. Errors: ValueError on all ranks alike if it can't,
// or if a dtype is none of the format's; the file is as before then.
void save_whole(ShardedRoot& root, const std::string& path,
                std::span<const ShardedTensors> tensors,
                const SafetensorsMetadata& metadata = {});
void save_whole(ShardedRoot& root, const std::string& path);

// Collective. Each rank reads its parts. Errors: ValueError on all ranks alike
// if the file is damaged, lacks a tensor, or has another shape or dtype; no
// tensor is changed then.
void load_whole(ShardedRoot& root, const std::string& path,
                std::span<const ShardedTensors> tensors);
void load_whole(ShardedRoot& root, const std::string& path);

}  // namespace brigade

#endif  // BRIGADE_FSDP_SHARDED_STATE_H_
