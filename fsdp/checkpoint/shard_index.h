// What a checkpoint of shards holds, and in which file each element lies.
//
// A value with its text: JSON, of which a checksum is the business of the file
// that it lies in (shard_files.h).
//
//   {"id": "04c1e0f1a2b3d", "num_files": 2, "world_size": 2, "tensors": [
//     {"name": "w", "dtype": "F32", "shape": [4, 3], "strides": [3, 1],
//      "chunks": [[0, 0, 8], [1, 8, 4]]},
//     {"name": "w.step", "dtype": "I64", "shape": [], "strides": []}]}
//
// Thread safety: values and pure functions.

#ifndef BRIGADE_FSDP_CHECKPOINT_SHARD_INDEX_H_
#define BRIGADE_FSDP_CHECKPOINT_SHARD_INDEX_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace brigade {

// Elements of a tensor as it lies in memory, `begin` the first.
struct ShardChunk {
  int64_t file = 0;
  int64_t begin = 0;
  int64_t numel = 0;  // > 0

  friend bool operator==(const ShardChunk&, const ShardChunk&) = default;
};

struct IndexedTensor {
  std::string name;
  std::string dtype;           // dtype_name()
  std::vector<int64_t> shape;  // of the whole tensor
  std::vector<int64_t> strides;
  // All elements, ascending; none: all of it is in the file of each rank that
  // has a part of its parameter.
  std::optional<std::vector<ShardChunk>> chunks;

  friend bool operator==(const IndexedTensor&, const IndexedTensor&) = default;
};

struct ShardIndex {
  std::string id;  // of the checkpoint; in the names of its files
  int64_t num_files = 0;
  int64_t world_size = 0;
  std::vector<IndexedTensor> tensors;

  friend bool operator==(const ShardIndex&, const ShardIndex&) = default;
};

// One piece of a chunk.
struct ChunkPiece {
  ShardChunk chunk;
  int64_t in_chunk = 0;  // offset of the first element
  int64_t in_range = 0;  // offset of it in what was asked for
  int64_t numel = 0;     // > 0

  friend bool operator==(const ChunkPiece&, const ChunkPiece&) = default;
};

// Where elements begin .. begin + numel of the tensor lie, each once,
// ascending. REQUIRES: it has chunks, and those elements.
std::vector<ChunkPiece> pieces_of(const IndexedTensor& tensor, int64_t begin,
                                  int64_t numel);

std::string format_shard_index(const ShardIndex& index);

// Errors: DataLoss if the text is no such index, a name occurs twice, or chunks
// do not cover their tensor.
absl::StatusOr<ShardIndex> parse_shard_index(std::string_view text);

}  // namespace brigade

#endif  // BRIGADE_FSDP_CHECKPOINT_SHARD_INDEX_H_
