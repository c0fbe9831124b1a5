#include "brigade/fsdp/sharding_options.h"

#include <limits>

#include "brigade/comm/ranks_of_host.h"

namespace brigade {

ShardingOptions shard_gradients(ShardingOptions options) {
  options.reshards_after_forward = false;
  return options;
}

ShardingOptions shard_optimizer_state(ShardingOptions options) {
  options.reshards_after_forward = false;
  options.reshards_after_backward = false;
  options.max_reducing = std::numeric_limits<size_t>::max();
  return options;
}

ShardingOptions hybrid_shard(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    ShardingOptions options) {
  if (!options.num_shards) options.num_shards = ranks_of_a_host(group);
  return options;
}

ShardingOptions shard_rows_of(const RankMesh& mesh, ShardingOptions options) {
  const int row_length = mesh.row_length();
  const int found = options.num_shards.value_or(row_length);
  TORCH_CHECK_VALUE(found == row_length,
                    "fully_shard: expected as many shards as a row of the mesh "
                    "has ranks, ",
                    row_length, ", found num_shards = ", found,
                    ".\nLeave it out: the mesh says it.");
  options.num_shards = row_length;
  return options;
}

}  // namespace brigade
