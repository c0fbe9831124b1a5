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
//            afterwards its files are removed.
//
// An element that several ranks hold is written by the lowest of them. Any
// number of ranks loads either layout, in any division: each rank reads the
// elements that it holds.
//
// Errors: c10::ValueError with the same text on all ranks for files that can't
// be written, are missing or damaged, or don't fit, and for ranks that differ.
// PeerError (c10::DistBackendError) if a peer is lost. The tensors and the
// previous checkpoint are unchanged then, unless the text says otherwise.
//
// Thread safety: as the group's collectives.

#ifndef BRIGADE_CHECKPOINT_TENSOR_FILES_H_
#define BRIGADE_CHECKPOINT_TENSOR_FILES_H_

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/checkpoint/checkpoint_model.h"

namespace brigade {

enum class CheckpointLayout : uint8_t { kFile, kFolder };

// Names and metadata of a checkpoint, as its header lists them.
struct CheckpointContents {
  std::set<std::string, std::less<>> names;  // of tensors
  CheckpointMetadata metadata;
};

// Collective: runs `step`, which must not communicate. If it throws on any
// rank, all ranks throw ValueError with that rank's text; also if the texts
// `equal`, each called `what`, differ between ranks after it.
void on_all_ranks(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                  const std::function<void()>& step,
                  const char* what = "checkpoint",
                  const std::vector<std::string>& equal = {});

// Collective.
void save_tensors(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                  const std::vector<CheckpointTensor>& tensors,
                  const std::string& path, CheckpointLayout layout,
                  CheckpointMetadata metadata);

// Collective: fills the tensors that `choose` returns for the checkpoint's
// contents. `choose` may throw; it must not communicate. Returns the metadata.
CheckpointMetadata load_tensors(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const std::string& path,
    const std::function<
        std::vector<CheckpointTensor>(const CheckpointContents&)>& choose);

}  // namespace brigade

#endif  // BRIGADE_CHECKPOINT_TENSOR_FILES_H_
