// Shapes of models for the simulator: parameters, FLOPs and activations by
// layer, without any tensor; layers to checkpoint, units to keep unsharded.
//
//   const ModelShape llama = *named_model("llama-70b", 4096);
//   llama.elements();  // 68,976,648,192
//
// FLOPs are those of a forward of one sample; a backward takes twice as many.
// Activations are those of one sample in 16 bits.
//
// Thread safety: functions are pure.

#ifndef BRIGADE_SIMULATION_MODEL_SHAPE_H_
#define BRIGADE_SIMULATION_MODEL_SHAPE_H_

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace brigade {

// A unit of sharding and of activation checkpointing.
struct ModelLayer {
  std::string name = {};
  std::vector<int64_t> tensors = {};  // elements of each parameter
  double forward_flops = 0;
  double activation_bytes = 0;  // kept from forward to backward
  double checkpoint_bytes = 0;  // kept instead, if the layer is recomputed
  // Measured seconds of a micro-batch; they replace `forward_flops`. Without
  // `backward_s`, a backward takes twice the forward.
  std::optional<double> forward_s = std::nullopt;
  std::optional<double> backward_s = std::nullopt;

  int64_t elements() const;
};

struct ModelShape {
  std::string name = {};
  std::vector<ModelLayer> layers = {};  // in order of forward

  int64_t elements() const;
};

// Names: "resnet50" (224 x 224 images), "bert-base", "bert-large", "gpt2" (124
// M), "gpt2-xl", "gpt3", "llama-7b" and "llama-70b" (Llama 2), "llama-405b"
// (Llama 3.1). A sequence length of 0 is the longest of its training.
//
// Errors: InvalidArgument for another name, or a sequence that is negative or
// longer than the model's learned positions or 2^24.
absl::StatusOr<ModelShape> named_model(std::string_view name,
                                       int64_t sequence_length = 0);

// ---- Memory of one rank. Vectors are indexed by layer.

// Elements of a layer on each rank, with padding: less than one element per
// rank for the layer (brigade, YaFSDP), or for each tensor (`by_tensor`: FSDP2,
// ZeRO-3, which pad by rows where this counts elements).
int64_t shard_elements(const ModelLayer& layer, int ranks,
                       bool by_tensor = false);

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

}  // namespace brigade

#endif  // BRIGADE_SIMULATION_MODEL_SHAPE_H_
