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

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <map>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "brigade/comm/process_group.h"

namespace brigade {

using CheckpointMetadata = std::map<std::string, std::string>;

// A tensor that the ranks of a group save or load, and this rank's shard of it.
struct CheckpointTensor {
  std::string name;
  std::vector<int64_t> shape;  // of the unsharded tensor
  // Defines the element order in which a shard is contiguous. Empty: C order.
  std::vector<int64_t> strides = {};
  // The unsharded tensor, or a 1D run of its consecutive elements.
  at::Tensor held;
  int64_t begin = 0;  // index of the first element in `held`
  // Ranks of the group that hold the tensor, ascending. Empty: all.
  std::vector<int> ranks = {};
  // Loading skips the tensor if the checkpoint lacks it.
  bool is_optional = false;
  // The optimizer's parameter, if it is not `held`. `part_of` then returns this
  // rank's shard of a tensor with the parameter's shape.
  at::Tensor parameter = {};
  at::Tensor (*part_of)(const at::Tensor& like_parameter) = nullptr;
};

// Describes a tensor that every rank holds unsharded.
CheckpointTensor unsharded_tensor(std::string name, const at::Tensor& tensor);

// The tensors to save or load, and the group whose ranks do so together. Append
// any other tensors of the checkpoint, for example the state of an unsupported
// optimizer.
struct CheckpointModel {
  // Takes parameters and buffers, which must be equal on all ranks; tied ones
  // once. NOLINTNEXTLINE(google-explicit-constructor): most models are modules.
  CheckpointModel(
      const torch::nn::Module& module,
      c10::intrusive_ptr<c10d::ProcessGroup> group = single_process_group());
  CheckpointModel(std::vector<CheckpointTensor> of_model,
                  c10::intrusive_ptr<c10d::ProcessGroup> of_ranks)
      : tensors(std::move(of_model)), group(std::move(of_ranks)) {}

  std::vector<CheckpointTensor> tensors;
  c10::intrusive_ptr<c10d::ProcessGroup> group;
};

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
