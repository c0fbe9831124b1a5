// Options of DistributedDataParallel.

#ifndef BRIGADE_DDP_DATA_PARALLEL_OPTIONS_H_
#define BRIGADE_DDP_DATA_PARALLEL_OPTIONS_H_

#include <c10/core/ScalarType.h>

#include <optional>
#include <string>
#include <vector>

#include "brigade/reducer/reducer_options.h"

namespace brigade {

// Forward runs on copies of the parameters in `parameters`, and floating-point
// tensors among its arguments are cast to it; outputs stay in it. Outside of
// forward parameters and gradients have their own precision
// (hooks/parameter_casts.h). Ignored parameters stay as they are.
//
// - Arguments are cast in vectors, arrays, maps, pairs, tuples, optionals and
//   IValues; structs and references inside of these are passed on as they are.
//   A change of an argument in forward may be made in a copy.
// - kHalf needs losses that are scaled; there is no loss scaling here.
// - checkpoint() inside of forward is refused while an optimizer steps in
//   backward, and if parameters are on several devices. A comm hook of your own
//   that writes to parameters must not meet checkpoints either.
struct MixedPrecision {
  at::ScalarType parameters = at::kBFloat16;
  // Of gradients as they travel, if it is smaller than their own; unset: as
  // `parameters`. Not with a comm hook, which decides itself.
  std::optional<at::ScalarType> reduction = std::nullopt;
  // Floating-point buffers are cast once, by the constructor; unset: they stay.
  // LibTorch's batch norm on the CPU needs them in `parameters`.
  std::optional<at::ScalarType> buffers = std::nullopt;
};

struct DistributedDataParallelOptions {
  // Its lists (bucket_plan, parameter_names, expect_sparse_gradients) are of
  // the parameters that require a gradient and are not ignored, in registration
  // order, each once. Names are taken from the module unless given.
  ReducerOptions reducer = {};

  // A forward that will be reduced begins with the buffers of rank 0, or of the
  // lowest rank with data while ranks join: one collective per dtype. If false,
  // each rank keeps its own; sync_buffers() makes them equal when asked.
  bool broadcast_buffers = true;

  // Names of parameters and buffers that each rank keeps to itself: not
  // compared, not made equal, not reduced.
  std::vector<std::string> ignored = {};

  // Unset: forward runs in the parameters' own precision.
  std::optional<MixedPrecision> mixed_precision = std::nullopt;
};

// The divisor of gradients while some ranks have no data.
enum class JoinDivisor {
  kWorldSize,      // inputs of equal size keep their weight to the end
  kRanksWithData,  // the average over the ranks that have data
};

}  // namespace brigade

#endif  // BRIGADE_DDP_DATA_PARALLEL_OPTIONS_H_
