#include "brigade/fsdp/sharded_state.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "brigade/comm/agreement.h"

namespace brigade {
namespace {

std::optional<SafetensorsDtype> format_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBool:
      return SafetensorsDtype::kBool;
    case at::kByte:
      return SafetensorsDtype::kU8;
    case at::kChar:
      return SafetensorsDtype::kI8;
    case at::kShort:
      return SafetensorsDtype::kI16;
    case at::kInt:
      return SafetensorsDtype::kI32;
    case at::kLong:
      return SafetensorsDtype::kI64;
    case at::kHalf:
      return SafetensorsDtype::kF16;
    case at::kBFloat16:
      return SafetensorsDtype::kBF16;
    case at::kFloat:
      return SafetensorsDtype::kF32;
    case at::kDouble:
      return SafetensorsDtype::kF64;
    case at::kComplexFloat:
      return SafetensorsDtype::kC64;
    default:
      return std::nullopt;
  }
}

// One tensor of a file, of one parameter.
struct Item {
  std::string name;
  const Segment* segment;
  size_t parameter;
  at::Tensor part;  // what this rank holds
};

// What all ranks save or load, in one order.
struct Items {
  std::vector<Item> items;
  absl::Status status;
};

Items items_of(const ShardedRoot& root,
               std::span<const ShardedTensors> tensors) {
  Items found;
  for (size_t unit = 0; unit < root.num_units(); ++unit) {
    for (const auto& segment : root.unit(unit).segments) {
      for (const ShardedTensors& kind : tensors) {
        for (size_t i = 0; i < segment->parameters().size(); ++i) {
          const at::Tensor& shard = segment->shards()[i];
          const at::Tensor part = kind.of(shard);
          if (!part.defined()) continue;
          std::string name =
              absl::StrCat(segment->parameters()[i].name, kind.suffix);
          if (found.status.ok() && part.numel() != shard.numel()) {
            found.status = absl::InvalidArgumentError(absl::StrCat(
                "'", name, "': expected ", shard.numel(),
                " elements, as the shard has, found ", part.numel(), "."));
          }
          if (found.status.ok() && !format_dtype(part.scalar_type())) {
            found.status = absl::InvalidArgumentError(
                absl::StrCat("'", name, "': safetensors files have no dtype ",
                             c10::toString(part.scalar_type()), "."));
          }
          found.items.push_back({.name = std::move(name),
                                 .segment = segment.get(),
                                 .parameter = i,
                                 .part = part.detach()});
        }
      }
    }
  }
  return found;
}

std::vector<SafetensorsEntry> entries_of(std::span<const Item> items) {
  std::vector<SafetensorsEntry> entries;
  for (const Item& item : items) {
    const at::Tensor& like = item.segment->parameters()[item.parameter].tensor;
    entries.push_back({.name = item.name,
                       .dtype = format_dtype(item.part.scalar_type())
                                    .value_or(SafetensorsDtype::kF32),
                       .shape = like.sizes().vec()});
  }
  return entries;
}

std::vector<std::string> words_of(std::span<const SafetensorsEntry> entries) {
  std::vector<std::string> words;
  for (const SafetensorsEntry& entry : entries) {
    words.push_back(absl::StrCat(entry.name, " ", dtype_name(entry.dtype)));
  }
  return words;
}

// All ranks throw alike if one can't go on, or if they have other tensors.
void agree(const ShardedRoot& root, std::span<const SafetensorsEntry> entries,
           const absl::Status& status) {
  require_agreement(root.group(), at::kCPU, "saved tensor", words_of(entries),
                    status);
}

std::span<const std::byte> bytes_of(const at::Tensor& contiguous) {
  return {static_cast<const std::byte*>(contiguous.const_data_ptr()),
          contiguous.nbytes()};
}

// The whole tensor, in the order of its dimensions. Collective.
at::Tensor gather_whole(ShardedRoot& root, const Item& item) {
  at::Tensor flat =
      at::zeros({item.segment->layout().shard_numel()}, item.part.options());
  const at::Tensor place = item.segment->part_of(flat, item.parameter);
  place.copy_(item.part.view(place.sizes()));
  return item.segment
      ->whole_of(root.gather(*item.segment, flat), item.parameter)
      .contiguous();
}

// Into this rank's part, from the file's whole tensor.
absl::Status read_part(const SafetensorsReader& reader, const Item& item,
                       const at::Tensor& part) {
  const at::Tensor& like = item.segment->parameters()[item.parameter].tensor;
  const int64_t element = part.element_size();
  if (like.is_contiguous()) {
    const ShardRange range =
        item.segment->layout().range(item.parameter, item.segment->rank());
    return reader.read(
        item.name, range.in_parameter * element,
        {static_cast<std::byte*>(part.mutable_data_ptr()), part.nbytes()});
  }
  const at::Tensor whole = at::empty(like.sizes(), part.options());
  absl::Status status = reader.read(
      item.name, 0,
      {static_cast<std::byte*>(whole.mutable_data_ptr()), whole.nbytes()});
  if (!status.ok()) return status;
  // As the parameter lies in memory.
  const at::Tensor in_memory =
      at::empty_strided(like.sizes(), like.strides(), part.options());
  in_memory.copy_(whole);
  const ShardRange range =
      item.segment->layout().range(item.parameter, item.segment->rank());
  part.view({-1}).copy_(
      in_memory.as_strided({range.numel}, {1}, range.in_parameter));
  return absl::OkStatus();
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
          "'", path, "': tensor '", expected.name,
          "' has another shape or dtype, ", dtype_name(found->dtype),
          " where the parameter has ", dtype_name(expected.dtype),
          ".\nLoad a file that was saved of the same model."));
    }
  }
  return absl::OkStatus();
}

}  // namespace

ShardedTensors parameters_of_shards() {
  return {.suffix = "", .of = [](const at::Tensor& shard) { return shard; }};
}

void save_whole(ShardedRoot& root, const std::string& path,
                std::span<const ShardedTensors> tensors,
                const SafetensorsMetadata& metadata) {
  const at::NoGradGuard no_grad;
  Items found = items_of(root, tensors);
  const std::vector<SafetensorsEntry> entries = entries_of(found.items);
  std::optional<SafetensorsWriter> writer;
  absl::Status status = found.status;
  if (status.ok() && root.group()->getRank() == 0) {
    auto created = SafetensorsWriter::create(path, entries, metadata);
    status = created.status();
    if (created.ok()) writer = *std::move(created);
  }
  agree(root, entries, status);
  for (size_t i = 0; i < found.items.size(); ++i) {
    const at::Tensor whole = gather_whole(root, found.items[i]);
    if (writer && status.ok()) status = writer->write(i, 0, bytes_of(whole));
  }
  if (writer && status.ok()) status = writer->finish();
  agree(root, entries, status);
}

void save_whole(ShardedRoot& root, const std::string& path) {
  const std::vector<ShardedTensors> tensors = {parameters_of_shards()};
  save_whole(root, path, tensors);
}

void load_whole(ShardedRoot& root, const std::string& path,
                std::span<const ShardedTensors> tensors) {
  const at::NoGradGuard no_grad;
  Items found = items_of(root, tensors);
  const std::vector<SafetensorsEntry> entries = entries_of(found.items);
  absl::Status status = found.status;
  absl::StatusOr<SafetensorsReader> reader = SafetensorsReader::open(path);
  if (status.ok()) status = reader.status();
  if (status.ok()) status = check_entries(*reader, entries, path);
  if (status.ok() && root.group()->getRank() == 0) status = reader->verify();
  std::vector<at::Tensor> parts;
  for (size_t i = 0; status.ok() && i < found.items.size(); ++i) {
    parts.push_back(at::empty_like(found.items[i].part));
    status = read_part(*reader, found.items[i], parts.back());
  }
  agree(root, entries, status);
  for (size_t i = 0; i < parts.size(); ++i) found.items[i].part.copy_(parts[i]);
}

void load_whole(ShardedRoot& root, const std::string& path) {
  const std::vector<ShardedTensors> tensors = {parameters_of_shards()};
  load_whole(root, path, tensors);
}

}  // namespace brigade
