#include "brigade/fsdp/fully_shard_options.h"

#include <limits>

#include "brigade/comm/ranks_of_host.h"

namespace brigade {

FullyShardOptions shard_gradients(FullyShardOptions options) {
  options.reshard_after_forward = false;
  return options;
}

FullyShardOptions shard_optimizer_state(FullyShardOptions options) {
  options.reshard_after_forward = false;
  options.reshard_after_backward = false;
  options.max_reducing = std::numeric_limits<size_t>::max();
  return options;
}

FullyShardOptions hybrid_shard(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    FullyShardOptions options) {
  if (!options.num_shards) options.num_shards = ranks_of_a_host(group);
  return options;
}

}  // namespace brigade
