// Strategies of data parallelism that the simulator knows, and their options.
//
// DDP, ZeRO-1 and ZeRO-2 reduce buckets, as predict() of planning/planners.h.
// A layer's gradients become ready one after the other during its backward, by
// their elements. ZeRO-1 and 2 gather the parameters' buckets after the
// optimizer, or (`next_forward_gather`) during the next forward.
//
// The other strategies all-gather each unit before its forward and its
// backward, and reduce-scatter it after its backward. All-gathers are issued
// `prefetch_depth` units ahead, within a forward or a backward. An all-gather
// waits for one of `buffers`, a backward for a buffer for gradients. They
// differ in:
//   zero3    one collective per tensor
//   fsdp2    copies unsharded parameters out and gradients in; one more buffer;
//            pads each tensor
//   yafsdp   the last `buffers` units stay unsharded from forward to backward
//   brigade  copies gradients in; one more buffer for gradients
// YaFSDP and FSDP2 order their collectives equally.

#ifndef BRIGADE_SIMULATION_STRATEGY_H_
#define BRIGADE_SIMULATION_STRATEGY_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "brigade/planning/bucket_plan.h"

namespace brigade {

enum class StrategyKind : uint8_t {
  kDdp,
  kZero1,
  kZero2,
  kZero3,
  kFsdp2,
  kYaFsdp,
  kBrigade
};

// DDP, ZeRO-1 and ZeRO-2.
constexpr bool has_buckets(StrategyKind kind) {
  return kind < StrategyKind::kZero3;
}

struct LayerChoice {
  enum class How : uint8_t { kNone, kAll, kFit, kListed };

  How how = How::kNone;  // kFit: as many as fit (kept), as few (checkpointed)
  std::vector<size_t> layers = {};  // kListed
};

struct Strategy {
  StrategyKind kind = StrategyKind::kBrigade;
  int shard_ranks = 0;  // 0: all; fewer: hybrid sharding

  // DDP, ZeRO-1, ZeRO-2.
  std::vector<int64_t> bucket_caps_bytes = {kDefaultBucketCapsBytes.begin(),
                                            kDefaultBucketCapsBytes.end()};
  bool has_exact_plan = false;       // plan_for_cost() instead of caps
  bool next_forward_gather = false;  // ZeRO-1, ZeRO-2

  // Sharded units.
  LayerChoice kept = {};  // unsharded from forward to backward
  int prefetch_depth = 1;
  int buffers = 2;  // of unsharded units

  int micro_batches = 1;
  bool sync_every_micro_batch = false;  // false: only the last one
  LayerChoice checkpointed = {};        // recomputed in backward

  // Per element.
  int parameter_bytes = 2;
  int gradient_bytes = 2;
  int optimizer_bytes = 12;
};

}  // namespace brigade

#endif  // BRIGADE_SIMULATION_STRATEGY_H_
