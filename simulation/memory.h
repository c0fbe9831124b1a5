// Memory of one rank: parameters, gradients, optimizer state, unsharded units
// and activations; the layers to checkpoint and the units to keep unsharded.
//
//   const std::vector<char> all(model.layers.size(), 1);
//   peak_activation_bytes(model, /*batch=*/1, all);
//
// Sizes are bytes. Vectors are indexed by layer.
//
// Thread safety: functions are pure.

#ifndef BRIGADE_SIMULATION_MEMORY_H_
#define BRIGADE_SIMULATION_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "brigade/simulation/model_shape.h"

namespace brigade {

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

// Elements of a layer on each rank, with padding: less than one element per
// rank for the layer (brigade, YaFSDP), or for each tensor (`by_tensor`: FSDP2,
// ZeRO-3, which pad by rows where this counts elements).
int64_t shard_elements(const ModelLayer& layer, int ranks,
                       bool by_tensor = false);

// Sum of the `count` largest.
double largest_sum(std::vector<double> bytes, size_t count);

// Peak over forward and backward. A checkpointed layer keeps checkpoint_bytes;
// its backward first computes its activations again, while those of earlier
// layers are kept.
double peak_activation_bytes(const ModelShape& model, double batch,
                             std::span<const char> checkpointed);

// Returns the layers to checkpoint so that the peak is at most `budget`.
// `recompute_s`: price of each layer. Checkpoints layers with the least price
// per byte saved first, earlier ones first if equal, then drops those that are
// not needed.
//
// For equal layers no choice recomputes less: each saves the same, so the
// number is the least that fits, and with the first layers the sum of kept
// bytes is the peak. Otherwise this is a heuristic (a knapsack).
//
// nullopt: no step of this method fits; `*least_bytes` is its least peak.
std::optional<std::vector<char>> checkpoints_to_fit(
    const ModelShape& model, double batch, std::span<const double> recompute_s,
    double budget, double* least_bytes);

// Returns the units to keep unsharded from forward to backward within `budget`,
// by all-gather time per byte kept, later units first if equal. The saved
// all-gather time is the greatest possible if units with parameters have equal
// bytes; otherwise less than one unit's share below it.
std::vector<char> units_to_keep(std::span<const double> unit_bytes,
                                std::span<const double> gather_s,
                                double budget);

}  // namespace brigade

#endif  // BRIGADE_SIMULATION_MEMORY_H_
