// Simulated training step of one rank: its compute, its collectives and its
// memory.
//
//   Strategy strategy = {.kind = StrategyKind::kFsdp2};
//   const TrainingStep step =
//       *simulate_step(*named_model("llama-7b"), /*batch=*/1, cluster,
//       strategy);
//
// Model: all ranks run the same program and wait for the slowest, so one rank
// stands for all. It runs compute in order. It runs collectives in order on one
// stream, and all-reduces between replicas (hybrid sharding) on another. Each
// layer of the model is a unit. Launches and allocations take no time.
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
//   yafsdp   the last min(`buffers`, `prefetch_depth` + 1) units stay unsharded
//            from forward to backward
//   brigade  copies gradients in; as many buffers as prefetch needs, and
//            `buffers` for gradients (ShardedModel::set_max_reducing())
// YaFSDP and FSDP2 order their collectives equally.
//
// Thread safety: functions are pure.

#ifndef BRIGADE_SIMULATION_TRAINING_STEP_H_
#define BRIGADE_SIMULATION_TRAINING_STEP_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "brigade/planning/bucket_plan.h"
#include "brigade/simulation/cluster.h"
#include "brigade/simulation/model_shape.h"

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

// Flags, by layer; those that are left out are 0. nullopt: as many layers as
// fit are kept, as few as fit are checkpointed.
using LayerChoice = std::optional<std::vector<char>>;

struct Strategy {
  StrategyKind kind = StrategyKind::kBrigade;
  int shard_ranks = 0;  // 0: all; fewer: hybrid sharding; DDP shards none

  // DDP, ZeRO-1, ZeRO-2.
  std::vector<int64_t> bucket_caps_bytes = {kDefaultBucketCapsBytes.begin(),
                                            kDefaultBucketCapsBytes.end()};
  bool has_exact_plan = false;       // plan_for_cost() instead of caps
  bool next_forward_gather = false;  // ZeRO-1, ZeRO-2

  // Sharded units.
  LayerChoice kept = std::vector<char>();  // unsharded from forward to backward
  int prefetch_depth = 1;
  int buffers = 2;  // of unsharded units

  int micro_batches = 1;
  bool sync_every_micro_batch = false;             // false: only the last one
  LayerChoice checkpointed = std::vector<char>();  // recomputed in backward

  // Per element.
  int parameter_bytes = 2;
  int gradient_bytes = 2;
  int optimizer_bytes = 12;
};

enum class Stream : uint8_t { kCompute, kCommunication, kReplication };

struct StepEvent {
  Stream stream = Stream::kCompute;
  std::string name = {};  // "forward layers.3", "all-gather layers.3"
  double begin_s = 0;
  double end_s = 0;
};

struct MemoryPoint {
  double time_s = 0;
  double bytes = 0;  // from this time on
};

// Each part is its own peak, so a rank never needs more than total().
struct MemoryPerRank {
  double parameters = 0;
  double gradients = 0;
  double optimizer = 0;
  double unsharded = 0;  // parameters and gradients
  double activations = 0;

  double total() const {
    return parameters + gradients + optimizer + unsharded + activations;
  }
};

struct TrainingStep {
  double step_s = 0;
  double forward_s = 0;   // with copies of parameters
  double backward_s = 0;  // with copies of gradients, without recomputing
  double recompute_s = 0;
  double optimizer_s = 0;
  double exposed_s = 0;  // step without compute
  double communication_s = 0;
  double tflops = 0;  // per GPU, without recomputing
  double mfu = 0;     // 0 if the device's peak is unknown
  Traffic traffic = {};
  MemoryPerRank memory = {};
  bool fits = true;
  std::vector<size_t> checkpointed_layers = {};
  std::vector<size_t> kept_units = {};
  std::vector<StepEvent> events = {};
  std::vector<MemoryPoint> memory_over_step = {};
};

// Errors: those of shard_group(); InvalidArgument if measured costs lack a
// collective, compute has no time, no choice of checkpoints fits (with the
// missing bytes), or a number overflows.
//
// REQUIRES: numbers and combinations that simulate_json() accepts.
absl::StatusOr<TrainingStep> simulate_step(const ModelShape& model,
                                           int64_t batch,
                                           const Cluster& cluster,
                                           const Strategy& strategy);

}  // namespace brigade

#endif  // BRIGADE_SIMULATION_TRAINING_STEP_H_
