// The tensors that all ranks save or load together, in one order, and this
// rank's part of each.
//
// What whole files (sharded_state.h) and files of shards (shard_files.h) have
// in common; how they are written is theirs.
//
// Thread safety: none.

#ifndef BRIGADE_FSDP_CHECKPOINT_CHECKPOINT_ITEMS_H_
#define BRIGADE_FSDP_CHECKPOINT_CHECKPOINT_ITEMS_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "brigade/fsdp/checkpoint/checkpointed_model.h"
#include "brigade/fsdp/checkpoint/safetensors_header.h"
#include "brigade/fsdp/checkpoint/sharded_tensors.h"

namespace brigade {

struct CheckpointItem {
  SafetensorsEntry entry;                            // of the whole tensor
  const CheckpointedParameter* parameter = nullptr;  // that it belongs to
  size_t kind = 0;                                   // of the ShardedTensors
  bool is_replicated = false;
  at::Tensor tensor;  // what this rank holds; not what autograd sees of it

  // This rank needs no other to have the whole.
  bool is_whole() const {
    return is_replicated || parameter->segment == nullptr;
  }

  // What this rank holds of the whole, in elements, as it lies in memory.
  int64_t begin() const { return is_replicated ? 0 : parameter->begin; }
  int64_t numel() const { return tensor.numel(); }

  // By which the whole tensor lies in memory; those of C order if it is
  // replicated.
  std::vector<int64_t> strides() const;
  bool is_in_c_order() const;

  // The tensor's elements in the order of memory, [numel()]. Perhaps a view.
  at::Tensor flat() const;
  // The tensor gets such elements.
  void assign(const at::Tensor& flat) const;
};

struct CheckpointItems {
  // Those of longer elements first: so each is aligned in a file. Else as the
  // units have them.
  std::vector<CheckpointItem> items;
  absl::Status status;  // what is wrong on this rank

  std::vector<SafetensorsEntry> entries() const;
};

// They refer to the model's parameters.
CheckpointItems checkpoint_items(const CheckpointedModel& model,
                                 std::span<const ShardedTensors> tensors);

// Collective. All ranks throw ValueError alike if one has an error, in `status`
// or its own, or if they have other tensors, or `others`; `compares_values`: or
// other values of those that are replicated.
void agree_on(const CheckpointedModel& model, const CheckpointItems& items,
              const absl::Status& status, bool compares_values,
              const std::vector<std::string>& others = {});

// Collective, where ranks have agreed that all items can be read: assigns what
// `read` gives of each, one at a time. Errors: ValueError on all ranks alike if
// one can't be read any more; some have been assigned then.
void assign_all(
    const CheckpointedModel& model, const CheckpointItems& items,
    const std::function<absl::StatusOr<at::Tensor>(const CheckpointItem&)>&
        read);

// For agree_on().
std::vector<std::string> words_of(const SafetensorsMetadata& metadata);

// Of the item's dtype, on the host: what a file is read into.
at::Tensor host_memory_for(const CheckpointItem& item, at::IntArrayRef sizes);

// REQUIRES: on the host.
std::span<const std::byte> bytes_of(const at::Tensor& contiguous);
std::span<std::byte> writable_bytes_of(const at::Tensor& contiguous);

}  // namespace brigade

#endif  // BRIGADE_FSDP_CHECKPOINT_CHECKPOINT_ITEMS_H_
