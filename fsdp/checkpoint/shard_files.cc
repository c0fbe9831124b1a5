#include "brigade/fsdp/checkpoint/shard_files.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "brigade/comm/group/control_device.h"
#include "brigade/fsdp/checkpoint/checkpoint_items.h"
#include "brigade/fsdp/checkpoint/safetensors_file.h"

namespace brigade {
namespace {

namespace fs = std::filesystem;

constexpr char kIndexKey[] = "brigade.shards";
constexpr char kIdKey[] = "brigade.checkpoint";
constexpr char kAnotherModel[] =
    ".\nLoad a checkpoint that was saved of the same model.";

std::string index_path(const std::string& folder) {
  return fs::path(folder) / "index.safetensors";
}

std::string shard_path(const std::string& folder, int64_t file,
                       int64_t num_files, const std::string& id) {
  return fs::path(folder) / absl::StrCat("shard-", file, "-of-", num_files, ".",
                                         id, ".safetensors");
}

absl::Status make_folder(const std::string& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (!error) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("'", folder, "' cannot be made: ", error.message(),
                   "\nCheck that the folder around it can be written."));
}

// Where this rank writes, and what it reads first. With meshes of units' own
// any rank may have what no other one has.
int64_t own_file(const ShardedRoot& root) {
  return root.has_own_meshes() ? root.group()->getRank() : root.shard_rank();
}
int64_t own_file(const CheckpointedModel& model) {
  return model.root() == nullptr ? 0 : own_file(*model.root());
}
int64_t num_files(const ShardedRoot& root) {
  return root.has_own_meshes() ? root.group()->getSize() : root.num_shards();
}

// Collective: rank 0's, on all ranks.
std::string draw_id(ShardedRoot& root) {
  constexpr int kBits = 52;  // a double holds them
  std::random_device random;
  const uint64_t drawn = (uint64_t{random()} << 32 | random()) >> (64 - kBits);
  const at::Tensor id = at::scalar_tensor(
      root.group()->getRank() == 0 ? static_cast<double>(drawn) : 0.0,
      at::kDouble);
  const at::Tensor values = id.view({1});
  root.sum_over_ranks(values, /*takes_largest=*/false);
  return absl::StrCat(absl::Hex(static_cast<uint64_t>(values.item<double>()),
                                absl::kZeroPad13));
}

bool is_empty(const CheckpointItem& item) {
  return !item.is_replicated && item.numel() == 0;
}

IndexedTensor indexed(const CheckpointItem& item,
                      const std::optional<UnitMesh>& mesh) {
  IndexedTensor tensor = {.name = item.entry.name,
                          .dtype = dtype_name(item.entry.dtype),
                          .shape = item.entry.shape,
                          .strides = item.strides(),
                          .chunks = std::nullopt};
  if (item.is_replicated) return tensor;
  tensor.chunks.emplace();
  const ShardLayout& layout = item.parameter->segment->layout();
  for (int64_t rank = 0; rank < layout.num_ranks(); ++rank) {
    const ShardRange range = layout.range(item.parameter->in_segment, rank);
    if (range.numel == 0) continue;
    tensor.chunks->push_back({.file = mesh ? mesh->ranks[rank] : rank,
                              .begin = range.in_parameter,
                              .numel = range.numel});
  }
  return tensor;
}

// Collective: each rank's text, by rank.
std::vector<std::string> gather_texts(c10d::ProcessGroup& group,
                                      const std::string& own) {
  const auto gather = [&](const at::Tensor& sent) {
    std::vector<at::Tensor> inputs = {sent.to(control_device(group))};
    std::vector<std::vector<at::Tensor>> outputs(1);
    for (int rank = 0; rank < group.getSize(); ++rank) {
      outputs.front().push_back(at::empty_like(inputs.front()));
    }
    group.allgather(outputs, inputs)->wait();
    for (at::Tensor& output : outputs.front()) output = output.cpu();
    return outputs.front();
  };
  std::vector<int64_t> lengths;
  for (const at::Tensor& length :
       gather(at::full({1}, static_cast<int64_t>(own.size()), at::kLong))) {
    lengths.push_back(length.item<int64_t>());
  }
  const at::Tensor bytes = at::zeros({std::ranges::max(lengths)}, at::kChar);
  std::ranges::copy(own, static_cast<char*>(bytes.mutable_data_ptr()));
  std::vector<std::string> texts;
  for (const at::Tensor& text : gather(bytes)) {
    texts.emplace_back(static_cast<const char*>(text.const_data_ptr()),
                       lengths[texts.size()]);
  }
  return texts;
}

// Collective: all tensors of all ranks, those of a mesh as its first rank has
// them. Errors: InvalidArgument, alike on all ranks.
absl::Status index_all(const ShardedRoot& root, const CheckpointItems& items,
                       ShardIndex& index) {
  ShardIndex own = index;
  for (const CheckpointItem& item : items.items) {
    const auto& mesh = root.unit(item.parameter->unit).mesh;
    if (!mesh) {
      index.tensors.push_back(indexed(item, mesh));
    } else if (mesh->place_of(root.group()->getRank()) == 0) {
      own.tensors.push_back(indexed(item, mesh));
    }
  }
  if (!root.has_own_meshes()) return absl::OkStatus();
  for (const std::string& text :
       gather_texts(*root.group(), format_shard_index(own))) {
    const absl::StatusOr<ShardIndex> theirs = parse_shard_index(text);
    if (!theirs.ok()) return theirs.status();
    index.tensors.insert(index.tensors.end(), theirs->tensors.begin(),
                         theirs->tensors.end());
  }
  std::set<std::string_view> names;
  for (const IndexedTensor& tensor : index.tensors) {
    if (names.insert(tensor.name).second) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "expected each tensor on one mesh, found '", tensor.name,
        "' on two, which hold different values.\nGive parameters that lie on "
        "different ranks different names."));
  }
  return absl::OkStatus();
}

absl::Status write_shard(const ShardedRoot& root, const CheckpointItems& items,
                         const std::string& path, const std::string& id) {
  std::vector<SafetensorsEntry> entries;
  std::vector<const CheckpointItem*> written;
  for (const CheckpointItem& item : items.items) {
    if (is_empty(item) || !root.is_first_replica(item.parameter->unit))
      continue;
    entries.push_back(item.entry);
    if (!item.is_replicated) entries.back().shape = {item.numel()};
    written.push_back(&item);
  }
  absl::StatusOr<SafetensorsWriter> writer =
      SafetensorsWriter::create(path, std::move(entries), {{kIdKey, id}});
  if (!writer.ok()) return writer.status();
  for (size_t i = 0; i < written.size(); ++i) {
    const at::Tensor part = written[i]->flat().cpu();  // one at a time
    absl::Status status = writer->write(i, 0, bytes_of(part));
    if (!status.ok()) return status;
  }
  return writer->finish();
}

absl::StatusOr<SafetensorsReader> open_shard(const std::string& folder,
                                             const ShardIndex& index,
                                             int64_t file) {
  const std::string path = shard_path(folder, file, index.num_files, index.id);
  absl::StatusOr<SafetensorsReader> reader = SafetensorsReader::open(path);
  if (!reader.ok()) return reader;
  const auto id = reader->metadata().find(kIdKey);
  if (id == reader->metadata().end() || id->second != index.id) {
    return absl::DataLossError(
        absl::StrCat(path, ": expected a file of checkpoint ", index.id,
                     ", found another.\nUse another copy of it."));
  }
  return reader;
}

absl::Status write_index(const std::string& folder, const ShardIndex& index,
                         SafetensorsMetadata metadata) {
  // A folder that each machine has for itself is found out here.
  for (int64_t file = 0; file < index.num_files; ++file) {
    absl::Status status = open_shard(folder, index, file).status();
    if (absl::IsNotFound(status)) {
      return absl::FailedPreconditionError(absl::StrCat(
          "rank 0 does not see what rank ", file, " has written to '", folder,
          "'.\nSave into a folder that all ranks share."));
    }
    if (!status.ok()) return status;
  }
  metadata[kIndexKey] = format_shard_index(index);
  absl::StatusOr<SafetensorsWriter> writer =
      SafetensorsWriter::create(index_path(folder), {}, std::move(metadata));
  return writer.ok() ? writer->finish() : writer.status();
}

// Those of other checkpoints, complete or not. A file that can't be removed
// stays: the checkpoint is good.
void remove_other_shards(const std::string& folder, const std::string& id) {
  std::error_code error;
  std::vector<fs::path> others;
  for (fs::directory_iterator entry(folder, error);
       !error && entry != fs::directory_iterator(); entry.increment(error)) {
    const std::string name = entry->path().filename();
    if (absl::StartsWith(name, "shard-") &&
        absl::StrContains(name, ".safetensors") &&
        !absl::StrContains(name, absl::StrCat(".", id, "."))) {
      others.push_back(entry->path());
    }
  }
  for (const fs::path& other : others) fs::remove(other, error);
}

// Of a dimension of one element they mean nothing.
std::vector<int64_t> strides_that_count(const std::vector<int64_t>& strides,
                                        const std::vector<int64_t>& shape) {
  std::vector<int64_t> counted = strides;
  for (size_t d = 0; d < shape.size(); ++d) {
    if (shape[d] == 1) counted[d] = 1;
  }
  return counted;
}

// Reads a rank's elements from files of shards, each opened once.
class ShardsReader {
 public:
  ShardsReader(std::string folder, const ShardIndex& index, int64_t own_file)
      : folder_(std::move(folder)),
        index_(index),
        own_file_(own_file < index.num_files ? own_file : 0) {
    for (const IndexedTensor& tensor : index.tensors) {
      tensors_.emplace(tensor.name, &tensor);
    }
  }

  // Whether the index has the tensor that the item stands for.
  absl::Status check(const CheckpointItem& item) const {
    const SafetensorsEntry& expected = item.entry;
    const std::string where =
        absl::StrCat("'", folder_, "': tensor '", expected.name, "'");
    const auto place = tensors_.find(expected.name);
    if (place == tensors_.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat(where, " is missing", kAnotherModel));
    }
    const IndexedTensor& found = *place->second;
    if (found.shape != expected.shape ||
        found.dtype != dtype_name(expected.dtype) ||
        found.chunks.has_value() == item.is_replicated) {
      return absl::InvalidArgumentError(absl::StrCat(
          where, " is ", found.dtype, " of [", absl::StrJoin(found.shape, ", "),
          "], where ", dtype_name(expected.dtype), " of [",
          absl::StrJoin(expected.shape, ", "), "] is expected", kAnotherModel));
    }
    if (strides_that_count(found.strides, found.shape) !=
        strides_that_count(item.strides(), found.shape)) {
      return absl::InvalidArgumentError(absl::StrCat(
          where,
          " lies in another order in memory than the parameter.\nGive the "
          "parameter the memory format that it was saved in, or use "
          "save_whole()."));
    }
    return absl::OkStatus();
  }

  // As CheckpointItem::flat(), on the host. REQUIRES: check(item) is OK.
  absl::StatusOr<at::Tensor> read(const CheckpointItem& item) {
    const IndexedTensor& tensor = *tensors_.at(item.entry.name);
    at::Tensor part = host_memory_for(item, {item.numel()});
    const std::span<std::byte> bytes = writable_bytes_of(part);
    if (!tensor.chunks) {
      absl::Status status =
          read_piece(item.entry,
                     {.chunk = {file_with(item.entry.name), 0, item.numel()},
                      .numel = item.numel()},
                     bytes);
      if (!status.ok()) return status;
      return part;
    }
    const int64_t element = part.element_size();
    for (const ChunkPiece& piece :
         pieces_of(tensor, item.begin(), item.numel())) {
      absl::Status status = read_piece(
          item.entry, piece,
          bytes.subspan(piece.in_range * element, piece.numel * element));
      if (!status.ok()) return status;
    }
    return part;
  }

 private:
  // What is not cut is in the files of all ranks that have it. In no file: this
  // rank's, where it is missed.
  int64_t file_with(const std::string& name) {
    const auto has_it = [&](int64_t file) {
      const absl::StatusOr<SafetensorsReader*> opened = open(file);
      return opened.ok() && (*opened)->find(name) != nullptr;
    };
    if (has_it(own_file_)) return own_file_;
    for (int64_t file = 0; file < index_.num_files; ++file) {
      if (has_it(file)) return file;
    }
    return own_file_;
  }

  absl::Status read_piece(const SafetensorsEntry& entry,
                          const ChunkPiece& piece, std::span<std::byte> bytes) {
    const absl::StatusOr<SafetensorsReader*> file = open(piece.chunk.file);
    if (!file.ok()) return file.status();
    const SafetensorsEntry* const found = (*file)->find(entry.name);
    const int64_t element = dtype_bytes(entry.dtype);
    if (found == nullptr || found->dtype != entry.dtype ||
        found->num_bytes() != piece.chunk.numel * element) {
      return absl::DataLossError(absl::StrCat(
          shard_path(folder_, piece.chunk.file, index_.num_files, index_.id),
          ": expected ", piece.chunk.numel, " elements of tensor ",
          quoted_name(entry.name), ", as the index says, found ",
          found == nullptr ? 0 : found->num_bytes() / element,
          ".\nUse another copy of it."));
    }
    if (piece.numel == piece.chunk.numel) {
      return (*file)->read_whole(entry.name, bytes);
    }
    if (verified_.emplace(piece.chunk.file, entry.name).second) {
      absl::Status status = (*file)->verify(entry.name);
      if (!status.ok()) return status;
    }
    return (*file)->read(entry.name, piece.in_chunk * element, bytes);
  }

  absl::StatusOr<SafetensorsReader*> open(int64_t file) {
    const auto found = files_.find(file);
    if (found != files_.end()) return &found->second;
    absl::StatusOr<SafetensorsReader> opened =
        open_shard(folder_, index_, file);
    if (!opened.ok()) return opened.status();
    return &files_.emplace(file, *std::move(opened)).first->second;
  }

  const std::string folder_;
  const ShardIndex& index_;
  const int64_t own_file_;  // where it looks first for what is not cut
  std::map<std::string_view, const IndexedTensor*> tensors_;
  std::map<int64_t, SafetensorsReader> files_;
  std::set<std::pair<int64_t, std::string>> verified_;
};

}  // namespace

void save_shards(const CheckpointedModel& model, const std::string& folder,
                 std::span<const ShardedTensors> tensors,
                 const SafetensorsMetadata& metadata) {
  const at::NoGradGuard no_grad;
  const CheckpointItems found = checkpoint_items(model, tensors);
  absl::Status status;
  if (model.root() == nullptr) {
    status = absl::InvalidArgumentError(
        "expected a sharded model, of which each rank writes its part, found "
        "one that each rank holds all of.\nUse save_whole().");
  } else if (metadata.contains(kIndexKey)) {
    status = absl::InvalidArgumentError(absl::StrCat(
        "metadata of shards has '", kIndexKey, "' of its own; leave it out"));
  } else {
    status = make_folder(folder);
  }
  agree_on(model, found, status, /*compares_values=*/true, words_of(metadata));

  ShardedRoot& root = *model.root();
  ShardIndex index = {.id = draw_id(root),
                      .num_files = num_files(root),
                      .world_size = root.group()->getSize(),
                      .tensors = {}};
  if (absl::Status names = index_all(root, found, index); status.ok()) {
    status = std::move(names);
  }
  agree_on(model, found, status, /*compares_values=*/false);
  const int rank = root.group()->getRank();
  const std::string own =
      shard_path(folder, own_file(root), index.num_files, index.id);
  const bool writes = rank < index.num_files;  // else a row before does
  absl::Cleanup remove_own = [&] {
    std::error_code ignored;
    if (writes) fs::remove(own, ignored);
  };
  if (writes) status = write_shard(root, found, own, index.id);
  agree_on(model, found, status, /*compares_values=*/false);

  // From here on the index may have replaced the one before.
  std::move(remove_own).Cancel();
  if (rank == 0) {
    status = write_index(folder, index, metadata);
    if (status.ok()) remove_other_shards(folder, index.id);
  }
  agree_on(model, found, status, /*compares_values=*/false);
}

void save_shards(const CheckpointedModel& model, const std::string& folder) {
  const std::vector<ShardedTensors> tensors = {parameters_of_shards()};
  save_shards(model, folder, tensors);
}

absl::StatusOr<ShardsContents> read_shards_index(const std::string& folder) {
  const std::string path = index_path(folder);
  const absl::StatusOr<SafetensorsReader> reader =
      SafetensorsReader::open(path);
  if (!reader.ok()) return reader.status();
  SafetensorsMetadata metadata = reader->metadata();
  const auto text = metadata.extract(kIndexKey);
  absl::StatusOr<ShardIndex> index =
      text.empty() ? absl::DataLossError("has no index of shards")
                   : parse_shard_index(text.mapped());
  if (!index.ok()) {
    return absl::DataLossError(
        absl::StrCat(path, ": ", index.status().message(),
                     "\nUse the folder that save_shards() has written."));
  }
  return ShardsContents{.index = *std::move(index),
                        .metadata = std::move(metadata)};
}

SafetensorsMetadata load_shards(const CheckpointedModel& model,
                                const std::string& folder,
                                std::span<const ShardedTensors> tensors) {
  const at::NoGradGuard no_grad;
  const CheckpointItems found = checkpoint_items(model, tensors);
  absl::StatusOr<ShardsContents> contents = read_shards_index(folder);
  absl::Status status = contents.status();
  std::optional<ShardsReader> reader;
  if (found.status.ok() && status.ok()) {
    reader.emplace(folder, contents->index, own_file(model));
    for (const CheckpointItem& item : found.items) {
      status = reader->check(item);
      if (status.ok()) status = reader->read(item).status();
      if (!status.ok()) break;
    }
  }
  std::vector<std::string> checkpoint;
  if (contents.ok()) {
    checkpoint.push_back(absl::StrCat("checkpoint ", contents->index.id));
  }
  agree_on(model, found, status, /*compares_values=*/false, checkpoint);
  assign_all(model, found,
             [&](const CheckpointItem& item) { return reader->read(item); });
  return std::move(contents->metadata);
}

SafetensorsMetadata load_shards(const CheckpointedModel& model,
                                const std::string& folder) {
  const std::vector<ShardedTensors> tensors = {parameters_of_shards()};
  return load_shards(model, folder, tensors);
}

}  // namespace brigade
