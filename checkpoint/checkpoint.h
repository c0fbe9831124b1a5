// Checkpoints of a model and its optimizer, saved and loaded by all ranks.
//
//   save_checkpoint("step-8.safetensors", {*net, group}, optimizer,
//                   {{"step", "8"}});
//   ...
//   const std::string step =
//       load_checkpoint("step-8.safetensors", {*net, group}, optimizer)
//           .at("step");
//
// Path: one ending in ".safetensors" is one file of unsharded tensors. Any
// other path is a folder with one file for each rank that writes; all ranks
// must see it, and no other program may use it. Any number of ranks can load
// either layout, sharded or not, in C++ and in Python.
//
// Model: `{*net, group}` is an unsharded module trained by the group's ranks;
// `*net` alone belongs to this process. checkpoint_model(root) of
// fsdp/sharded_model.h describes a sharded model.
//
// Content: parameters, an unsharded module's buffers, and the optimizer's state
// and options. Supports SGD, Adam, AdamW, RMSprop and Adagrad. Loading sets the
// saved options and warns of each option that differed.
//
// Saving replaces the previous checkpoint atomically, once the new one is
// complete and synced to disk. All files have checksums. Loading changes
// nothing if a file is damaged or does not match the model.
//
// Errors: ValueError with the same text on all ranks; c10::DistBackendError if
// a peer is lost.
//
// Thread safety: none. Call between steps, with the same arguments on all
// ranks.

#ifndef BRIGADE_CHECKPOINT_CHECKPOINT_H_
#define BRIGADE_CHECKPOINT_CHECKPOINT_H_

#include <torch/optim/optimizer.h>

#include <string>

#include "brigade/checkpoint/checkpoint_model.h"

namespace brigade {

// Collective.
void save_checkpoint(const std::string& path, const CheckpointModel& model,
                     const torch::optim::Optimizer& optimizer,
                     const CheckpointMetadata& metadata = {});
void save_checkpoint(const std::string& path, const CheckpointModel& model,
                     const CheckpointMetadata& metadata = {});

// Collective. Returns the metadata. The optimizer need not have stepped.
CheckpointMetadata load_checkpoint(const std::string& path,
                                   const CheckpointModel& model,
                                   torch::optim::Optimizer& optimizer);
CheckpointMetadata load_checkpoint(const std::string& path,
                                   const CheckpointModel& model);

}  // namespace brigade

#endif  // BRIGADE_CHECKPOINT_CHECKPOINT_H_
