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
// other path is a folder of one file for each rank that writes (checkpoint/
// tensor_files.h describes both). Any number of ranks loads either, sharded or
// not, in C++ and in Python.
//
// `{*net, group}` is an unsharded module, as in data-parallel training; `*net`
// alone is one of this process. A sharded model is checkpoint_model(root)
// (fsdp/sharded_model.h).
//
// A checkpoint has the parameters, the buffers of an unsharded module, and the
// optimizer's state and options. Loading sets the saved options, as torch's
// load_state_dict() does, and warns of each option that differed.
//
// Saving replaces the previous checkpoint at the path in one step, when the new
// one is complete and on the disk. All data has checksums. Loading changes
// nothing if a file is damaged or does not fit. Errors are ValueError with the
// same text on all ranks.
//
// Thread safety: none. Call between steps, with the same arguments on all
// ranks.

#ifndef BRIGADE_CHECKPOINT_CHECKPOINT_H_
#define BRIGADE_CHECKPOINT_CHECKPOINT_H_

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/checkpoint/optimizer_state.h"
#include "brigade/checkpoint/tensor_files.h"
#include "brigade/comm/process_group.h"

namespace brigade {

// The tensors to save or load, and the group whose ranks do so together. Append
// other tensors that belong in the checkpoint, such as the state of an
// optimizer of another type.
struct CheckpointModel {
  // Parameters and buffers that are equal on all ranks, tied ones once.
  // NOLINTNEXTLINE(google-explicit-constructor): most models are modules.
  CheckpointModel(
      const torch::nn::Module& module,
      c10::intrusive_ptr<c10d::ProcessGroup> group = single_process_group());
  CheckpointModel(std::vector<CheckpointTensor> of_model,
                  c10::intrusive_ptr<c10d::ProcessGroup> of_ranks)
      : tensors(std::move(of_model)), group(std::move(of_ranks)) {}

  std::vector<CheckpointTensor> tensors;
  c10::intrusive_ptr<c10d::ProcessGroup> group;
};

// A tensor that every rank holds unsharded.
CheckpointTensor unsharded_tensor(std::string name, const at::Tensor& tensor);

// Collective.
void save_checkpoint(const std::string& path, const CheckpointModel& model,
                     const torch::optim::Optimizer& optimizer,
                     const SafetensorsMetadata& metadata = {});
void save_checkpoint(const std::string& path, const CheckpointModel& model,
                     const SafetensorsMetadata& metadata = {});

// Collective. Returns the metadata. The optimizer may be new.
SafetensorsMetadata load_checkpoint(const std::string& path,
                                    const CheckpointModel& model,
                                    torch::optim::Optimizer& optimizer);
SafetensorsMetadata load_checkpoint(const std::string& path,
                                    const CheckpointModel& model);

// The same for optimizers of any library. nullptr: no optimizer.
void save_checkpoint(const std::string& path, CheckpointLayout layout,
                     const CheckpointModel& model, const OptimizerState* state,
                     SafetensorsMetadata metadata);

struct LoadedCheckpoint {
  SafetensorsMetadata metadata;
  std::vector<std::string> warnings;
};

// Fills `state` with the saved state, for set_state().
LoadedCheckpoint load_checkpoint(const std::string& path,
                                 const CheckpointModel& model,
                                 OptimizerState* state);

}  // namespace brigade

#endif  // BRIGADE_CHECKPOINT_CHECKPOINT_H_
