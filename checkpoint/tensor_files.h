// Files of a checkpoint's tensors, which ranks hold sharded or unsharded.
//
// Two layouts have the same content; loading recognizes a file or a folder:
//
//   kFile    One safetensors file of unsharded tensors. Rank 0 writes it, and
//            all-gathers the ranks' shards one tensor at a time.
//   kFolder  Each rank writes its shards to
//            `shard-<rank>-of-<world size>.<id>.safetensors`. Then rank 0
//            replaces `index.safetensors`, which has the id and the location of
//            all elements. Until then the previous checkpoint is complete;
//            afterwards its files are removed.
//
// If several ranks hold an element, the lowest of them writes it. Any number of
// ranks can load either layout under any sharding: each rank reads the elements
// that it holds.
//
// Errors: c10::ValueError with the same text on all ranks if a file can't be
// written, is missing or damaged, or does not match, or if ranks differ.
// PeerError (c10::DistBackendError) if a peer is lost. After an error the
// tensors and the previous checkpoint are unchanged, unless its text says
// otherwise.
//
// Thread safety: that of the group's collectives.

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

struct CheckpointContents {
  std::set<std::string, std::less<>> names;  // of tensors
  CheckpointMetadata metadata;
};

// Collective: runs `step`, which must not communicate. If `step` throws on any
// rank, all ranks throw ValueError with that rank's text. All ranks also throw
// if the texts `equal` then differ between ranks; `compared` names them in
// the error.
void on_all_ranks(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                  const std::function<void()>& step,
                  const char* compared = "checkpoint",
                  const std::vector<std::string>& equal = {});

// Collective.
void save_tensors(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                  const std::vector<CheckpointTensor>& tensors,
                  const std::string& path, CheckpointLayout layout,
                  CheckpointMetadata metadata);

// Collective: loads the tensors that `choose` selects from the checkpoint's
// contents. `choose` may throw; it must not communicate. Returns the metadata.
CheckpointMetadata load_tensors(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const std::string& path,
    const std::function<
        std::vector<CheckpointTensor>(const CheckpointContents&)>& choose);

}  // namespace brigade

#endif  // BRIGADE_CHECKPOINT_TENSOR_FILES_H_
