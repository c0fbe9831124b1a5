#include "brigade/fsdp/checkpoint_items.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <utility>

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

const at::Tensor& parameter_of(const CheckpointItem& item) {
  return item.segment->parameters()[item.parameter].tensor;
}

ShardRange range_of(const CheckpointItem& item) {
  return item.segment->layout().range(item.parameter, item.segment->rank());
}

absl::Status check(const CheckpointItem& item, const at::Tensor& shard) {
  if (!item.is_replicated && item.tensor.numel() != shard.numel()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "'", item.entry.name, "': expected ", shard.numel(),
        " elements, as the shard has, found ", item.tensor.numel(), "."));
  }
  if (!format_dtype(item.tensor.scalar_type())) {
    return absl::InvalidArgumentError(absl::StrCat(
        "'", item.entry.name, "': safetensors files have no dtype ",
        c10::toString(item.tensor.scalar_type()), "."));
  }
  return absl::OkStatus();
}

CheckpointItem item_of(const Segment& segment, size_t parameter,
                       const ShardedTensors& kind, at::Tensor tensor) {
  const NamedParameter& named = segment.parameters()[parameter];
  SafetensorsEntry entry = {
      .name = absl::StrCat(named.name, kind.suffix),
      .dtype =
          format_dtype(tensor.scalar_type()).value_or(SafetensorsDtype::kF32),
      .shape = kind.is_replicated ? tensor.sizes().vec()
                                  : named.tensor.sizes().vec()};
  return {.entry = std::move(entry),
          .segment = &segment,
          .parameter = parameter,
          .is_replicated = kind.is_replicated,
          .tensor = std::move(tensor)};
}

}  // namespace

int64_t CheckpointItem::begin() const {
  return is_replicated ? 0 : range_of(*this).in_parameter;
}

std::vector<int64_t> CheckpointItem::strides() const {
  return is_replicated ? tensor.contiguous().strides().vec()
                       : parameter_of(*this).strides().vec();
}

bool CheckpointItem::is_in_c_order() const {
  return is_replicated || parameter_of(*this).is_contiguous();
}

at::Tensor CheckpointItem::flat() const {
  const at::Tensor& like = parameter_of(*this);
  if (is_replicated || tensor.sizes() != like.sizes()) {
    return tensor.contiguous().view({-1});
  }
  at::Tensor in_memory = tensor;
  if (tensor.strides() != like.strides()) {
    in_memory =
        at::empty_strided(like.sizes(), like.strides(), tensor.options());
    in_memory.copy_(tensor);
  }
  return in_memory.as_strided({numel()}, {1});
}

void CheckpointItem::assign(const at::Tensor& flat) const {
  const at::Tensor& like = parameter_of(*this);
  const bool is_whole = !is_replicated && tensor.sizes() == like.sizes();
  tensor.copy_(is_whole ? flat.as_strided(like.sizes(), like.strides())
                        : flat.view(tensor.sizes()));
}

std::vector<SafetensorsEntry> CheckpointItems::entries() const {
  std::vector<SafetensorsEntry> entries;
  entries.reserve(items.size());
  for (const CheckpointItem& item : items) entries.push_back(item.entry);
  return entries;
}

CheckpointItems checkpoint_items(const ShardedRoot& root,
                                 std::span<const ShardedTensors> tensors) {
  CheckpointItems found;
  for (size_t unit = 0; unit < root.num_units(); ++unit) {
    for (const auto& segment : root.unit(unit).segments) {
      for (size_t kind = 0; kind < tensors.size(); ++kind) {
        for (size_t i = 0; i < segment->parameters().size(); ++i) {
          const at::Tensor& shard = segment->shards()[i];
          const at::Tensor tensor = tensors[kind].of(shard);
          if (!tensor.defined()) continue;
          CheckpointItem item =
              item_of(*segment, i, tensors[kind], tensor.detach());
          item.unit = unit;
          item.kind = kind;
          if (found.status.ok()) found.status = check(item, shard);
          found.items.push_back(std::move(item));
        }
      }
    }
  }
  std::ranges::stable_sort(
      found.items, std::greater<>(),
      [](const CheckpointItem& item) { return dtype_bytes(item.entry.dtype); });
  return found;
}

void agree_on(const ShardedRoot& root, const CheckpointItems& items,
              const absl::Status& status, bool compares_values) {
  std::vector<std::string> words;
  for (const CheckpointItem& item : items.items) {
    // On other meshes it is another parameter, of the same kind.
    const bool is_own = root.unit(item.unit).mesh.has_value();
    words.push_back(
        absl::StrCat(is_own ? "of a mesh of its own" : item.entry.name, " ",
                     dtype_name(item.entry.dtype)));
    if (compares_values && item.is_replicated && !is_own) {
      absl::StrAppend(
          &words.back(), " of checksum ",
          absl::Hex(
              extend_checksum(0, bytes_of(item.tensor.contiguous().cpu())),
              absl::kZeroPad8));
    }
  }
  require_agreement(root.group(), at::kCPU, "saved tensor", words,
                    items.status.ok() ? status : items.status);
}

at::Tensor host_memory_for(const CheckpointItem& item, at::IntArrayRef sizes) {
  return at::empty(sizes, item.tensor.options().device(at::kCPU));
}

std::span<const std::byte> bytes_of(const at::Tensor& contiguous) {
  return {static_cast<const std::byte*>(contiguous.const_data_ptr()),
          contiguous.nbytes()};
}

std::span<std::byte> writable_bytes_of(const at::Tensor& contiguous) {
  return {static_cast<std::byte*>(contiguous.mutable_data_ptr()),
          contiguous.nbytes()};
}

}  // namespace brigade
