// Tensors of a checkpoint, and this rank's shards of them.
//
// Thread safety: none.

#ifndef BRIGADE_CHECKPOINT_CHECKPOINT_MODEL_H_
#define BRIGADE_CHECKPOINT_CHECKPOINT_MODEL_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

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

CheckpointTensor unsharded_tensor(std::string name, const at::Tensor& tensor);

// The tensors to save or load, and the group whose ranks do so together. Append
// any other tensors of the checkpoint, for example the state of an unsupported
// optimizer.
struct CheckpointModel {
  // Takes parameters and buffers, tied ones once. All ranks must have equal
  // values.
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

}  // namespace brigade

#endif  // BRIGADE_CHECKPOINT_CHECKPOINT_MODEL_H_
