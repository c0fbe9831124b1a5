// Inputs of a simulated step, derived from model, cluster and strategy: checked
// options, groups, compute times, bytes of units, choices and memory.
//
// Internal to training_step.cc. Vectors are indexed by layer.

#ifndef BRIGADE_SIMULATION_STEP_SET_UP_H_
#define BRIGADE_SIMULATION_STEP_SET_UP_H_

#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "brigade/planning/bucket_plan.h"
#include "brigade/planning/planners.h"
#include "brigade/simulation/cluster.h"
#include "brigade/simulation/memory.h"
#include "brigade/simulation/model_shape.h"
#include "brigade/simulation/strategy.h"

namespace brigade {

struct StepSetUp {
  RankGroup shards = {};
  RankGroup replicas = {};  // 1 rank: none
  size_t num_buffers = 1;   // of the unit in use and those gathered ahead
  size_t num_gradient_buffers = 0;
  double shard_elements = 0;  // of all parameters, with padding

  // With compute_slowdown().
  std::vector<double> forward_s = {};
  std::vector<double> backward_s = {};
  // Of one unit, each time.
  std::vector<double> copy_parameters_s = {};
  std::vector<double> copy_gradients_s = {};
  double optimizer_s = 0;

  std::vector<double> unit_bytes = {};      // unsharded, with padding
  std::vector<double> gradient_bytes = {};  // unsharded, with padding
  std::vector<char> checkpointed = {};
  std::vector<char> kept = {};   // unsharded until its backward ends
  std::vector<char> stays = {};  // same, in one of the buffers
  bool accumulates = false;      // unsharded gradients, over micro-batches
  MemoryPerRank memory = {};

  // Buckets of DDP, ZeRO-1 and ZeRO-2.
  Backward backward = {};
  CollectiveCost reduce_cost = *CollectiveCost::linear(0, 0);
  std::optional<BucketPlan> plan = std::nullopt;
  std::vector<double> bucket_elements = {};
};

// The reduction of a bucket over all ranks: of the shard group, then of the
// replica group.
CollectiveRun run_reduction(double bytes, const StepSetUp& set_up,
                            const Cluster& cluster);

// Errors: those of simulate_step().
absl::StatusOr<StepSetUp> set_up_step(const ModelShape& model, int64_t batch,
                                      const Cluster& cluster,
                                      const Strategy& strategy);

}  // namespace brigade

#endif  // BRIGADE_SIMULATION_STEP_SET_UP_H_
