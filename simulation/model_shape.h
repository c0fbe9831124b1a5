// Shapes of models for the simulator: parameters, FLOPs and activations by
// layer, without any tensor.
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
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
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

// Errors: InvalidArgument if there is no layer or no parameter, a tensor has no
// element, there are more than 10,000 layers, 100,000 tensors or 2^50 elements,
// or a number is negative or not finite.
absl::Status check_model(const ModelShape& model);

}  // namespace brigade

#endif  // BRIGADE_SIMULATION_MODEL_SHAPE_H_
