// What a checkpoint of a sharded model is to hold: the parts of its parameters,
// and what an optimizer keeps beside them.

#ifndef BRIGADE_FSDP_CHECKPOINT_SHARDED_TENSORS_H_
#define BRIGADE_FSDP_CHECKPOINT_SHARDED_TENSORS_H_

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>

namespace brigade {

// A tensor for each shard: "weight" + suffix.
struct ShardedTensors {
  std::string suffix;
  // Of a shard, of ShardedRoot::shards(); undefined: it has none, on all ranks.
  std::function<at::Tensor(const at::Tensor& shard)> of;
  // False: of the shard's sizes, a part of what all ranks hold. True: of any
  // sizes, whole, and equal on all ranks of the unit's mesh, as a count of
  // steps.
  bool is_replicated = false;
};

// The shards themselves.
inline ShardedTensors parameters_of_shards() {
  return {.suffix = "", .of = [](const at::Tensor& shard) { return shard; }};
}

}  // namespace brigade

#endif  // BRIGADE_FSDP_CHECKPOINT_SHARDED_TENSORS_H_
