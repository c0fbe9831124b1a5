// Saves what a LibTorch optimizer keeps for the shards of a model, with the
// model, and loads it on any number of ranks, sharded or not.
//
//   FullySharded model(net, group);
//   torch::optim::AdamW optimizer(model.parameters(), 1e-3);
//   ...
//   save_whole(model.root(), optimizer, "step 17.safetensors", {{"step",
//   "17"}});
//   ...
//   load_whole(model.root(), optimizer, "step 17.safetensors");
//
// The same of a model that is not sharded, as a data-parallel one, whose
// parameters the optimizer steps:
//
//   load_whole(CheckpointedModel(*net, group), optimizer,
//              "step 17.safetensors");
//
// Of SGD, Adam, AdamW, RMSprop and Adagrad, and classes derived from them. What
// AdamW keeps of "weight" are the tensors "weight.exp_avg", "weight.exp_avg_sq"
// and "weight.step", the last an I64 without dimensions. A parameter that was
// never stepped has none of them. The optimizer's name is in the metadata as
// "brigade.optimizer". Options, as learning rates, are the program's: they are
// neither saved nor loaded.
//
// Errors of all below, besides those of the functions that they are named for:
// ValueError on all ranks alike for an optimizer of another type, or one with a
// parameter that is none of the model's.
//
// Thread safety: as ShardedRoot, between forwards and backwards.

#ifndef BRIGADE_FSDP_CHECKPOINT_OPTIMIZER_STATE_H_
#define BRIGADE_FSDP_CHECKPOINT_OPTIMIZER_STATE_H_

#include <torch/optim/optimizer.h>

#include <string>

#include "brigade/fsdp/checkpoint/checkpointed_model.h"
#include "brigade/fsdp/checkpoint/safetensors_header.h"

namespace brigade {

// Collective.
void save_whole(const CheckpointedModel& model,
                const torch::optim::Optimizer& optimizer,
                const std::string& path,
                const SafetensorsMetadata& metadata = {});

// Collective: parameters, and the optimizer's state, which becomes the saved
// one, whether the optimizer has taken a step or not. Returns the metadata.
// Errors: ValueError on all ranks alike if what was saved is another
// optimizer's, or of other options (a momentum, say) or parameters; nothing is
// changed then. Parameters alone can be loaded (sharded_state.h).
SafetensorsMetadata load_whole(const CheckpointedModel& model,
                               torch::optim::Optimizer& optimizer,
                               const std::string& path);

// The same, each rank its own part (shard_files.h). Collective.
void save_shards(const CheckpointedModel& model,
                 const torch::optim::Optimizer& optimizer,
                 const std::string& folder,
                 const SafetensorsMetadata& metadata = {});
SafetensorsMetadata load_shards(const CheckpointedModel& model,
                                torch::optim::Optimizer& optimizer,
                                const std::string& folder);

}  // namespace brigade

#endif  // BRIGADE_FSDP_CHECKPOINT_OPTIMIZER_STATE_H_
