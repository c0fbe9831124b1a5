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
// reader is stricter in two points: other fields of a tensor and space before
// the header are errors. Of a name that occurs twice the last one counts.
// Dtypes of less than a byte are errors.
//
// The metadata gets "brigade.crc32": the CRC-32 of the file with "00000000" in
// place of its digits. A file without it is not verified, so programs that
// rewrite a file leave it out.
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
  int64_t begin = 0;                // of its data in the file; set by readers

  int64_t num_bytes() const;
};

using SafetensorsMetadata = std::map<std::string, std::string>;

// The format's name of a dtype, "BF16"; throws if there is none. And back.
std::string safetensors_dtype_name(c10::ScalarType dtype);
std::optional<c10::ScalarType> safetensors_dtype(std::string_view name);

// Writes `<path>.tmp-<16 digits>`, which finish() renames to `path`. Without
// finish() the destructor removes it, and the previous file at `path` stays.
// Only a killed process leaves it.
//
// Thread safety: none. Several writers of one path do not disturb each other.
class SafetensorsWriter {
 public:
  // The data lies in the order of `entries`: tensors of longer elements first
  // are aligned.
  SafetensorsWriter(std::string path,
                    const std::vector<SafetensorsEntry>& entries,
                    const SafetensorsMetadata& metadata = {});
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  void write(std::span<const std::byte> bytes);  // appends

  // Returns once the complete file is at its path, on the disk.
  void finish();

 private:
  const std::string path_;
  const std::string head_;  // up to the data, with zeros for the checksum
  const std::string temporary_path_;
  std::ofstream file_;
  int64_t num_missing_ = 0;   // bytes of data that write() has not got yet
  uint32_t checksum_ = 0;     // of the bytes before
  bool is_finished_ = false;  // `temporary_path_` is gone
};

// Thread safety: none.
class SafetensorsReader {
 public:
  // Checks that the tensors fill the file exactly, then reads all of it for its
  // checksum.
  explicit SafetensorsReader(std::string path);

  const std::string& path() const { return path_; }
  using Entries = std::map<std::string, SafetensorsEntry, std::less<>>;
  const Entries& entries() const { return entries_; }  // by name
  // Without the checksum.
  const SafetensorsMetadata& metadata() const { return metadata_; }
  // CRC-32 of the header, which contains the file's if it has one.
  const std::string& header_checksum() const { return header_checksum_; }

  // Fills `bytes` from byte `offset_bytes` of the tensor.
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
