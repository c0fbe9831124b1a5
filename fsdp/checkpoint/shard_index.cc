#include "brigade/fsdp/checkpoint/shard_index.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "brigade/fsdp/checkpoint/safetensors_header.h"

namespace brigade {
namespace {

using Json = nlohmann::json;

// As in the header of a file.
constexpr int64_t kMostElements = int64_t{1} << 62;

absl::Status damaged(const std::string& what) {
  return absl::DataLossError(absl::StrCat("the index of shards ", what));
}

// -1: too many.
int64_t numel_of(const std::vector<int64_t>& shape) {
  int64_t numel = 1;
  for (const int64_t length : shape) {
    if (length < 0) return -1;
    if (length == 0) return 0;
    if (numel > kMostElements / length) return -1;
    numel *= length;
  }
  return numel;
}

absl::Status check_tensor(const IndexedTensor& tensor, int64_t num_files) {
  const std::string name = quoted_name(tensor.name);
  const int64_t numel = numel_of(tensor.shape);
  if (numel < 0 || tensor.strides.size() != tensor.shape.size()) {
    return damaged(absl::StrCat("has no shape of tensor ", name));
  }
  if (!tensor.chunks) return absl::OkStatus();
  int64_t covered = 0;
  for (const ShardChunk& chunk : *tensor.chunks) {
    if (chunk.file < 0 || chunk.file >= num_files || chunk.begin != covered ||
        chunk.numel <= 0 || chunk.numel > numel - covered) {
      return damaged(absl::StrCat("has chunks of tensor ", name,
                                  " that do not follow each other"));
    }
    covered += chunk.numel;
  }
  if (covered != numel) {
    return damaged(absl::StrCat("has ", covered, " elements of tensor ", name,
                                ", expected ", numel));
  }
  return absl::OkStatus();
}

absl::Status check(const ShardIndex& index) {
  if (index.num_files < 1 || index.world_size < index.num_files) {
    return damaged(absl::StrCat("names ", index.num_files, " files of ",
                                index.world_size, " ranks"));
  }
  std::set<std::string_view> names;
  for (const IndexedTensor& tensor : index.tensors) {
    if (!names.insert(tensor.name).second) {
      return damaged(
          absl::StrCat("has tensor ", quoted_name(tensor.name), " twice"));
    }
    absl::Status status = check_tensor(tensor, index.num_files);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

Json json_of(const IndexedTensor& tensor) {
  Json json = {{"name", tensor.name},
               {"dtype", tensor.dtype},
               {"shape", tensor.shape},
               {"strides", tensor.strides}};
  if (tensor.chunks) {
    Json& chunks = json["chunks"] = Json::array();
    for (const ShardChunk& chunk : *tensor.chunks) {
      chunks.push_back({chunk.file, chunk.begin, chunk.numel});
    }
  }
  return json;
}

// Throws Json::exception.
IndexedTensor tensor_of(const Json& json) {
  IndexedTensor tensor = {
      .name = json.at("name").get<std::string>(),
      .dtype = json.at("dtype").get<std::string>(),
      .shape = json.at("shape").get<std::vector<int64_t>>(),
      .strides = json.at("strides").get<std::vector<int64_t>>(),
      .chunks = std::nullopt};
  if (json.contains("chunks")) {
    tensor.chunks.emplace();
    for (const Json& chunk : json.at("chunks")) {
      tensor.chunks->push_back({.file = chunk.at(0).get<int64_t>(),
                                .begin = chunk.at(1).get<int64_t>(),
                                .numel = chunk.at(2).get<int64_t>()});
    }
  }
  return tensor;
}

}  // namespace

std::vector<ChunkPiece> pieces_of(const IndexedTensor& tensor, int64_t begin,
                                  int64_t numel) {
  std::vector<ChunkPiece> pieces;
  auto chunk = std::ranges::upper_bound(*tensor.chunks, begin, std::less<>(),
                                        &ShardChunk::begin);
  if (numel > 0) --chunk;
  for (int64_t done = 0; done < numel; ++chunk) {
    const int64_t in_chunk = begin + done - chunk->begin;
    pieces.push_back(
        {.chunk = *chunk,
         .in_chunk = in_chunk,
         .in_range = done,
         .numel = std::min(chunk->numel - in_chunk, numel - done)});
    done += pieces.back().numel;
  }
  return pieces;
}

std::string format_shard_index(const ShardIndex& index) {
  Json tensors = Json::array();
  for (const IndexedTensor& tensor : index.tensors) {
    tensors.push_back(json_of(tensor));
  }
  const Json json = {{"id", index.id},
                     {"num_files", index.num_files},
                     {"world_size", index.world_size},
                     {"tensors", std::move(tensors)}};
  // Names that are no text are refused where the files are written.
  return json.dump(/*indent=*/-1, ' ', /*ensure_ascii=*/false,
                   Json::error_handler_t::replace);
}

absl::StatusOr<ShardIndex> parse_shard_index(std::string_view text) {
  ShardIndex index;
  try {
    const Json json = Json::parse(text);
    index.id = json.at("id").get<std::string>();
    index.num_files = json.at("num_files").get<int64_t>();
    index.world_size = json.at("world_size").get<int64_t>();
    for (const Json& tensor : json.at("tensors")) {
      index.tensors.push_back(tensor_of(tensor));
    }
  } catch (const Json::exception& error) {
    return damaged(absl::StrCat("cannot be read: ", error.what()));
  }
  if (absl::Status status = check(index); !status.ok()) return status;
  return index;
}

}  // namespace brigade
