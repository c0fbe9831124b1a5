#include "brigade/fsdp/sharding_options.h"

#include <limits>

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

}  // namespace brigade
