// A model whose parameters are saved or loaded: a sharded one, or one of which
// each rank holds all, as in data-parallel training or in one process.
//
//   load_whole(model.root(), optimizer, path);  // of a FullySharded
//   load_whole(CheckpointedModel(*net, group), optimizer, path);
//
// Thread safety: none. It is for the time of a call.

#ifndef BRIGADE_FSDP_CHECKPOINT_CHECKPOINTED_MODEL_H_
#define BRIGADE_FSDP_CHECKPOINT_CHECKPOINTED_MODEL_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "absl/status/status.h"
#include "brigade/comm/process_group.h"
#include "brigade/fsdp/sharded_root.h"

namespace brigade {

// What this rank holds of it: a shard, or all.
struct CheckpointedParameter {
  std::string name;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;  // of the whole, where it lies densely
  at::Tensor held;               // what an optimizer is given
  int64_t begin = 0;             // of that, among the whole's elements

  // Where it is a part of a root's; null: this rank holds all of it.
  const Segment* segment = nullptr;
  size_t in_segment = 0;
  size_t unit = 0;
  bool is_on_own_mesh = false;  // of the unit's
};

class CheckpointedModel {
 public:
  // NOLINTNEXTLINE(google-explicit-constructor): what is mostly saved
  CheckpointedModel(ShardedRoot& root);

  // Parameters that are equal on all ranks of `group`, tied ones once. Without
  // a group this process has them for itself.
  explicit CheckpointedModel(
      const torch::nn::Module& module,
      c10::intrusive_ptr<c10d::ProcessGroup> group = single_process_group());
  explicit CheckpointedModel(
      const std::vector<NamedParameter>& parameters,
      c10::intrusive_ptr<c10d::ProcessGroup> group = single_process_group());

  const std::vector<CheckpointedParameter>& parameters() const {
    return parameters_;
  }
  ShardedRoot* root() const { return root_; }  // null: all is held
  bool is_first_rank() const { return group_->getRank() == 0; }

  // Collective. This rank's place among those that read one file, by its
  // file_id(), and how many they are. Hosts are taken to have files of their
  // own.
  struct Reader {
    size_t place = 0;
    size_t num_readers = 1;
  };
  Reader reader_of(uint64_t file_id) const;

  // Collective: ranks compare `items`, of which each is a `what`. Errors:
  // ValueError, alike on all ranks, if one's `status` is not OK, or they
  // differ.
  void require_agreement(const std::string& what,
                         const std::vector<std::string>& items,
                         const absl::Status& status) const;

 private:
  ShardedRoot* root_ = nullptr;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::vector<CheckpointedParameter> parameters_;
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_CHECKPOINT_CHECKPOINTED_MODEL_H_
