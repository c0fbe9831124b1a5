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
// Thread safety: functions are pure.

#ifndef BRIGADE_SIMULATION_TRAINING_STEP_H_
#define BRIGADE_SIMULATION_TRAINING_STEP_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "brigade/simulation/cluster.h"
#include "brigade/simulation/memory.h"
#include "brigade/simulation/model_shape.h"
#include "brigade/simulation/strategy.h"

namespace brigade {

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
  // Per rank, on average over ranks.
  double sent_bytes = 0;
  double between_hosts_bytes = 0;
  double between_racks_bytes = 0;
  MemoryPerRank memory = {};
  bool fits = true;
  std::vector<size_t> checkpointed_layers = {};
  std::vector<size_t> kept_units = {};
  std::vector<StepEvent> events = {};
  std::vector<MemoryPoint> memory_over_step = {};
};

// Errors: those of check_model() and check_cluster(); InvalidArgument if a
// number is out of range, an option does not apply to the strategy, measured
// costs lack a collective, compute has no time, or no choice of checkpoints
// fits (with the missing bytes).
absl::StatusOr<TrainingStep> simulate_step(const ModelShape& model,
                                           int64_t batch,
                                           const Cluster& cluster,
                                           const Strategy& strategy);

}  // namespace brigade

#endif  // BRIGADE_SIMULATION_TRAINING_STEP_H_
