// Checkpoints of a model and its optimizer, by all ranks that train it.
//
//   save_checkpoint("step-8.safetensors", {*net, group}, optimizer,
//                   {{"step", "8"}});
//   ...
//   const std::string step =
//       load_checkpoint("step-8.safetensors", {*net, group}, optimizer)
//           .at("step");
//
// A path that ends in ".safetensors" is one file of unsharded tensors; any
// other path is a folder of one file for each rank that writes, which all ranks
// must see and nothing else may use. Any number of ranks loads either, sharded
// or not, in C++ and in Python.
//
// `{*net, group}` is an unsharded module, as in data-parallel training; `*net`
// alone is one of this process. A sharded model is checkpoint_model(root)
// (fsdp/sharded_model.h).
//
// A checkpoint has the parameters, the buffers of an unsharded module, and the
// optimizer's state and options: of SGD, Adam, AdamW, RMSprop and Adagrad.
// Loading sets the saved options, as torch's load_state_dict() does, and warns
// of each option that differed.
//
// Saving replaces the previous checkpoint at the path in one step, when the new
// one is complete and on the disk. All files have checksums. Loading changes
// nothing if a file is damaged or does not fit. Errors are ValueError with the
// same text on all ranks; c10::DistBackendError if a peer is lost.
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

// Collective. Returns the metadata. The optimizer may be new.
CheckpointMetadata load_checkpoint(const std::string& path,
                                   const CheckpointModel& model,
                                   torch::optim::Optimizer& optimizer);
CheckpointMetadata load_checkpoint(const std::string& path,
                                   const CheckpointModel& model);

}  // namespace brigade

#endif  // BRIGADE_CHECKPOINT_CHECKPOINT_H_
