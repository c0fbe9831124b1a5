#include "brigade/fsdp/checkpoint/checkpoint_items.h"

#include <ATen/TensorGeometry.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"

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

absl::Status check(const CheckpointItem& item) {
  const int64_t numel = item.parameter->held.numel();
  if (!item.is_replicated && item.tensor.numel() != numel) {
    return absl::InvalidArgumentError(absl::StrCat(
        "'", item.entry.name, "': expected ", numel,
        " elements, as the shard has, found ", item.tensor.numel(), "."));
  }
  if (!format_dtype(item.tensor.scalar_type())) {
    return absl::InvalidArgumentError(absl::StrCat(
        "'", item.entry.name, "': safetensors files have no dtype ",
        c10::toString(item.tensor.scalar_type()), "."));
  }
  return absl::OkStatus();
}

CheckpointItem item_of(const CheckpointedParameter& parameter, size_t kind,
                       const ShardedTensors& of_kind, at::Tensor tensor) {
  SafetensorsEntry entry = {
      .name = absl::StrCat(parameter.name, of_kind.suffix),
      .dtype =
          format_dtype(tensor.scalar_type()).value_or(SafetensorsDtype::kF32),
      .shape = of_kind.is_replicated ? tensor.sizes().vec() : parameter.shape};
  return {.entry = std::move(entry),
          .parameter = &parameter,
          .kind = kind,
          .is_replicated = of_kind.is_replicated,
          .tensor = std::move(tensor)};
}

}  // namespace

std::vector<int64_t> CheckpointItem::strides() const {
  return is_replicated ? tensor.contiguous().strides().vec()
                       : parameter->strides;
}

bool CheckpointItem::is_in_c_order() const {
  return is_replicated ||
         at::geometry_is_contiguous(parameter->shape, parameter->strides);
}

at::Tensor CheckpointItem::flat() const {
  if (is_replicated || tensor.sizes() != parameter->shape) {
    return tensor.contiguous().view({-1});
  }
  at::Tensor in_memory = tensor;
  if (tensor.strides() != parameter->strides) {
    in_memory = at::empty_strided(parameter->shape, parameter->strides,
                                  tensor.options());
    in_memory.copy_(tensor);
  }
  return in_memory.as_strided({numel()}, {1});
}

void CheckpointItem::assign(const at::Tensor& flat) const {
  const bool has_all = !is_replicated && tensor.sizes() == parameter->shape;
  tensor.copy_(has_all ? flat.as_strided(parameter->shape, parameter->strides)
                       : flat.view(tensor.sizes()));
}

std::vector<SafetensorsEntry> CheckpointItems::entries() const {
  std::vector<SafetensorsEntry> entries;
  entries.reserve(items.size());
  for (const CheckpointItem& item : items) entries.push_back(item.entry);
  return entries;
}

CheckpointItems checkpoint_items(const CheckpointedModel& model,
                                 std::span<const ShardedTensors> tensors) {
  CheckpointItems found;
  const std::vector<CheckpointedParameter>& parameters = model.parameters();
  for (size_t begin = 0, end = 0; begin < parameters.size(); begin = end) {
    // Those of a segment travel together, kind by kind.
    end = begin + 1;
    while (end < parameters.size() && parameters[end].segment != nullptr &&
           parameters[end].segment == parameters[begin].segment) {
      ++end;
    }
    for (size_t kind = 0; kind < tensors.size(); ++kind) {
      for (size_t i = begin; i < end; ++i) {
        const at::Tensor tensor = tensors[kind].of(parameters[i].held);
        if (!tensor.defined()) continue;
        CheckpointItem item =
            item_of(parameters[i], kind, tensors[kind], tensor.detach());
        if (found.status.ok()) found.status = check(item);
        found.items.push_back(std::move(item));
      }
    }
  }
  std::ranges::stable_sort(
      found.items, std::greater<>(),
      [](const CheckpointItem& item) { return dtype_bytes(item.entry.dtype); });
  return found;
}

void agree_on(const CheckpointedModel& model, const CheckpointItems& items,
              const absl::Status& status, bool compares_values,
              const std::vector<std::string>& others) {
  std::vector<std::string> words = others;
  for (const CheckpointItem& item : items.items) {
    // On other meshes it is another parameter, of the same kind.
    const bool is_own = item.parameter->is_on_own_mesh;
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
  model.require_agreement("saved tensor", words,
                          items.status.ok() ? status : items.status);
}

void assign_all(
    const CheckpointedModel& model, const CheckpointItems& items,
    const std::function<absl::StatusOr<at::Tensor>(const CheckpointItem&)>&
        read) {
  absl::Status status;
  for (const CheckpointItem& item : items.items) {
    const absl::StatusOr<at::Tensor> value = read(item);
    if (!value.ok()) {
      status = absl::Status(
          value.status().code(),
          absl::StrCat(value.status().message(),
                       "\nSome tensors have been loaded, others have not: load "
                       "a checkpoint before anything else."));
      break;
    }
    item.assign(*value);
  }
  agree_on(model, items, status, /*compares_values=*/false);
}

std::vector<std::string> words_of(const SafetensorsMetadata& metadata) {
  std::vector<std::string> words;
  for (const auto& [key, value] : metadata) {
    const uint32_t checksum =
        extend_checksum(0, std::as_bytes(std::span(value)));
    words.push_back(absl::StrCat("metadata ", quoted_name(key), ": ",
                                 quoted_name(value), " of checksum ",
                                 absl::Hex(checksum, absl::kZeroPad8)));
  }
  return words;
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
