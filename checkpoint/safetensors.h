// Reader and writer of safetensors files: named tensors and metadata in one
// file, with a checksum.
//
//   SafetensorsWriter writer("w.safetensors", {{"w", at::kFloat, {4, 3}}},
//                            {{"step", "17"}});
//   writer.write(first_half);
//   writer.write(second_half);
//   writer.finish();
//
//   SafetensorsReader reader("w.safetensors");
//   reader.read("w", 12, second_row);
//
// Data is little-endian, in C order. Python's package `safetensors` reads and
// writes the same format, https://github.com/huggingface/safetensors. This
// reader is stricter: unknown fields of a tensor, spaces before the header and
// dtypes smaller than a byte are errors. If a name occurs twice, the last
// entry counts.
//
// The writer adds the metadata "brigade.crc32": the CRC-32 of the file with
// "00000000" in place of its digits. A file without it is not verified;
// programs that rewrite a file must remove it.
//
// Errors: every function throws c10::ValueError "<path>: ..." for a file that
// is damaged, missing or cannot be written.

#ifndef BRIGADE_CHECKPOINT_SAFETENSORS_H_
#define BRIGADE_CHECKPOINT_SAFETENSORS_H_

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace brigade {

struct SafetensorsEntry {
  std::string name;
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::vector<int64_t> shape = {};  // {}: a scalar
  int64_t begin = 0;                // offset of its data; set by readers

  int64_t num_bytes() const;
};

using SafetensorsMetadata = std::map<std::string, std::string>;

// Returns the format's name of a dtype, "BF16"; throws if there is none.
std::string safetensors_dtype_name(c10::ScalarType dtype);
std::optional<c10::ScalarType> safetensors_dtype(std::string_view name);

// Writer that replaces a file atomically. Writes to `<path>.tmp-<16 digits>`,
// which finish() renames to `path`. Without finish() the destructor removes the
// temporary file and keeps the previous file. A killed process leaves the
// temporary file.
//
// Thread safety: none. Several writers may write the same path at once.
class SafetensorsWriter {
 public:
  // Data is expected in the order of `entries`. For alignment, list tensors
  // with larger elements first.
  SafetensorsWriter(std::string path,
                    const std::vector<SafetensorsEntry>& entries,
                    const SafetensorsMetadata& metadata = {});
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  void write(std::span<const std::byte> bytes);  // appends

  // Blocks until the complete file is at its path and synced to disk.
  void finish();

 private:
  const std::string path_;
  const std::string head_;  // up to the data, with zeros for the checksum
  const std::string temporary_path_;
  std::ofstream file_;
  int64_t num_missing_ = 0;  // bytes of data not yet written
  uint32_t checksum_ = 0;    // of `head_` and the data written
  bool is_finished_ = false;
};

// Thread safety: none.
class SafetensorsReader {
 public:
  // Checks that the tensors fill the file exactly, then reads the whole file to
  // verify its checksum.
  explicit SafetensorsReader(std::string path);

  const std::string& path() const { return path_; }
  using Entries = std::map<std::string, SafetensorsEntry, std::less<>>;
  const Entries& entries() const { return entries_; }  // by name
  // Excludes "brigade.crc32".
  const SafetensorsMetadata& metadata() const { return metadata_; }
  // CRC-32 of the header. It depends on the data if the header has a checksum.
  const std::string& header_checksum() const { return header_checksum_; }

  // Fills `bytes` with the tensor's data from byte `offset_bytes`.
  void read(std::string_view name, int64_t offset_bytes,
            std::span<std::byte> bytes);

 private:
  void read_at(int64_t offset, std::span<std::byte> bytes);
  void place_entries(int64_t data_begin);
  void verify(std::string head);

  const std::string path_;
  std::ifstream file_;
  int64_t num_bytes_ = 0;
  Entries entries_;
  SafetensorsMetadata metadata_;
  std::string header_checksum_;
};

}  // namespace brigade

#endif  // BRIGADE_CHECKPOINT_SAFETENSORS_H_
