// Files of tensors that the ranks of a group hold sharded or unsharded.
//
// Two layouts hold the same content; loading distinguishes a file and a folder:
//
//   kFile    One safetensors file of unsharded tensors. Rank 0 writes it and
//            receives the other ranks' shards, one tensor at a time.
//   kFolder  Each rank writes the shard that it holds, without communication:
//            `shard-<rank>-of-<world size>.<id>.safetensors`. Then rank 0
//            replaces `index.safetensors`, which names the id and the place of
//            all elements. Until then the previous checkpoint is complete;
//            afterwards its files are removed. All ranks must see the folder,
//            and nothing else may use it.
//
// An element that several ranks hold is written by the lowest of them. Any
// number of ranks loads either layout, in any division: each rank reads the
// elements that it holds.
//
// Loading verifies the checksums of all data before it changes any tensor.
//
// Errors: c10::ValueError with the same text on all ranks for files that can't
// be written, are missing or damaged, or don't fit, and for ranks that differ.
// PeerError (c10::DistBackendError) if a peer is lost. The tensors and the
// previous checkpoint are unchanged then, unless the text says otherwise.
//
// Thread safety: as the group's collectives.

#ifndef BRIGADE_CHECKPOINT_TENSOR_FILES_H_
#define BRIGADE_CHECKPOINT_TENSOR_FILES_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/checkpoint/safetensors.h"

namespace brigade {

// A tensor that the ranks of a group save or load, and this rank's shard of it.
struct CheckpointTensor {
  std::string name;
  std::vector<int64_t> shape;    // of the unsharded tensor
  std::vector<int64_t> strides;  // dense; the order of its elements
  // The unsharded tensor, of `shape` and any strides, or consecutive elements
  // of it, 1D.
  at::Tensor held;
  int64_t begin = 0;  // number of the first element held
  // The ranks of the group that hold it, ascending. Empty: all.
  std::vector<int> ranks = {};
  // Loading leaves it as it is if the checkpoint lacks it. Saving takes the
  // first rank's value if it differs between ranks.
  bool is_optional = false;
  // What optimizers have in place of `held`, if that is another tensor, and the
  // part that this rank holds of a tensor like it.
  at::Tensor parameter = {};
  at::Tensor (*part_of)(const at::Tensor& like_parameter) = nullptr;
};

enum class CheckpointLayout : uint8_t { kFile, kFolder };

// Names and metadata of a checkpoint, as its header lists them.
struct CheckpointContents {
  std::string path;
  std::set<std::string, std::less<>> names;  // of tensors
  SafetensorsMetadata metadata;
};

// Collective: runs `step` and returns every rank's result. If it throws on any
// rank, all ranks throw ValueError with that rank's text. `step` must not
// communicate.
std::vector<std::string> on_all_ranks(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const std::function<std::string()>& step);

// Collective. A tensor of no dimensions that is not optional must have the same
// value on all ranks.
void save_tensors(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                  const std::vector<CheckpointTensor>& tensors,
                  const std::string& path, CheckpointLayout layout,
                  SafetensorsMetadata metadata);

// Collective: fills the tensors that `choose` returns for the checkpoint's
// contents. `choose` may throw; it must not communicate. Returns the metadata.
SafetensorsMetadata load_tensors(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const std::string& path,
    const std::function<
        std::vector<CheckpointTensor>(const CheckpointContents&)>& choose);

}  // namespace brigade

#endif  // BRIGADE_CHECKPOINT_TENSOR_FILES_H_
