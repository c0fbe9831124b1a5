#include "brigade/fsdp/checkpoint/sharded_state.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "brigade/fsdp/checkpoint/checkpoint_items.h"

namespace brigade {
namespace {

// How many items from the first on travel in one gather.
size_t run_length(std::span<const CheckpointItem> items) {
  const CheckpointItem& first = items.front();
  if (first.is_whole()) return 1;
  size_t length = 1;
  while (length < items.size() && !items[length].is_whole() &&
         items[length].parameter->segment == first.parameter->segment &&
         items[length].kind == first.kind &&
         items[length].entry.dtype == first.entry.dtype) {
    ++length;
  }
  return length;
}

// Collective: the whole tensors of such a run, one after the other.
at::Tensor gather_run(ShardedRoot& root,
                      std::span<const CheckpointItem> items) {
  const Segment& segment = *items.front().parameter->segment;
  const at::Tensor shard = at::zeros({segment.layout().shard_numel()},
                                     items.front().tensor.options());
  for (const CheckpointItem& item : items) {
    const ShardRange range =
        segment.layout().range(item.parameter->in_segment, segment.rank());
    shard.narrow(0, range.in_shard, range.numel).copy_(item.flat());
  }
  return root.gather(segment, shard);
}

// This rank's part of the file's whole tensor, as CheckpointItem::flat(), on
// the host.
absl::StatusOr<at::Tensor> read_part(const SafetensorsReader& reader,
                                     const CheckpointItem& item) {
  const std::string& name = item.entry.name;
  if (item.is_in_c_order()) {
    at::Tensor part = host_memory_for(item, {item.numel()});
    absl::Status status = reader.read(name, item.begin() * part.element_size(),
                                      writable_bytes_of(part));
    if (!status.ok()) return status;
    return part;
  }
  const at::Tensor whole = host_memory_for(item, item.entry.shape);
  absl::Status status = reader.read(name, 0, writable_bytes_of(whole));
  if (!status.ok()) return status;
  const at::Tensor in_memory =
      at::empty_strided(item.entry.shape, item.strides(), whole.options());
  in_memory.copy_(whole);
  return in_memory.as_strided({item.numel()}, {1}, item.begin());
}

absl::Status check_entries(const SafetensorsReader& reader,
                           std::span<const SafetensorsEntry> entries,
                           const std::string& path) {
  for (const SafetensorsEntry& expected : entries) {
    const SafetensorsEntry* const found = reader.find(expected.name);
    if (found == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("'", path, "' has no tensor '", expected.name,
                       "'.\nLoad a file that was saved of the same model."));
    }
    if (found->shape != expected.shape || found->dtype != expected.dtype) {
      return absl::InvalidArgumentError(absl::StrCat(
          "'", path, "': tensor '", expected.name, "' is ",
          dtype_name(found->dtype), " of [", absl::StrJoin(found->shape, ", "),
          "], where ", dtype_name(expected.dtype), " of [",
          absl::StrJoin(expected.shape, ", "),
          "] is expected.\nLoad a file that was saved of the same model."));
    }
  }
  return absl::OkStatus();
}

// Those who read one file share what there is to be read again.
absl::Status verify_share(const SafetensorsReader& reader,
                          const CheckpointedModel::Reader& own) {
  for (size_t i = own.place; i < reader.entries().size();
       i += own.num_readers) {
    absl::Status status = reader.verify(reader.entries()[i].name);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace

void save_whole(const CheckpointedModel& model, const std::string& path,
                std::span<const ShardedTensors> tensors,
                const SafetensorsMetadata& metadata) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      model.root() == nullptr || !model.root()->has_other_units_elsewhere(),
      "save_whole: units have meshes of fewer ranks than the root, and rank 0 "
      "has those of its own meshes only.\nUse save_shards().");
  const at::NoGradGuard no_grad;
  const CheckpointItems found = checkpoint_items(model, tensors);
  std::optional<SafetensorsWriter> writer;
  absl::Status status;
  if (found.status.ok() && model.is_first_rank()) {
    auto created = SafetensorsWriter::create(path, found.entries(), metadata);
    status = created.status();
    if (created.ok()) writer = *std::move(created);
  }
  agree_on(model, found, status, /*compares_values=*/true, words_of(metadata));
  const auto write = [&](size_t item, const at::Tensor& whole) {
    if (!writer || !status.ok()) return;
    status = writer->write(item, 0, bytes_of(whole.contiguous().cpu()));
  };
  const std::span<const CheckpointItem> items = found.items;
  for (size_t begin = 0; begin < items.size();) {
    const size_t length = run_length(items.subspan(begin));
    if (items[begin].is_whole()) {
      write(begin, items[begin].tensor);
    } else {
      const at::Tensor run =
          gather_run(*model.root(), items.subspan(begin, length));
      for (size_t i = begin; i < begin + length; ++i) {
        const CheckpointedParameter& parameter = *items[i].parameter;
        write(i, parameter.segment->whole_of(run, parameter.in_segment));
      }
    }
    begin += length;
  }
  if (writer && status.ok()) status = writer->finish();
  agree_on(model, found, status, /*compares_values=*/false);
}

void save_whole(const CheckpointedModel& model, const std::string& path) {
  const std::vector<ShardedTensors> tensors = {parameters_of_shards()};
  save_whole(model, path, tensors);
}

SafetensorsMetadata load_whole(const CheckpointedModel& model,
                               const std::string& path,
                               std::span<const ShardedTensors> tensors) {
  const at::NoGradGuard no_grad;
  const CheckpointItems found = checkpoint_items(model, tensors);
  const absl::StatusOr<SafetensorsReader> reader =
      SafetensorsReader::open(path);
  absl::Status status = reader.status();
  if (status.ok()) status = check_entries(*reader, found.entries(), path);
  const CheckpointedModel::Reader own =
      model.reader_of(reader.ok() ? reader->file_id() : 0);
  if (status.ok()) status = verify_share(*reader, own);
  std::vector<std::string> contents;
  if (reader.ok()) {
    contents.push_back(absl::StrCat(
        "a file of checksum ", absl::Hex(reader->checksum(), absl::kZeroPad8)));
  }
  agree_on(model, found, status, /*compares_values=*/false, contents);
  assign_all(model, found, [&](const CheckpointItem& item) {
    return read_part(*reader, item);
  });
  return reader->metadata();
}

SafetensorsMetadata load_whole(const CheckpointedModel& model,
                               const std::string& path) {
  const std::vector<ShardedTensors> tensors = {parameters_of_shards()};
  return load_whole(model, path, tensors);
}

}  // namespace brigade
