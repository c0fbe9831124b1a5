// Reader and writer of safetensors files: named tensors and metadata in one
// file, with checksums.
//
//   SafetensorsWriter writer("w.safetensors", {{"w", at::kFloat, {4, 3}}},
//                            {{"step", "17"}});
//   writer.write(first_half);
//   writer.write(second_half);
//   writer.finish();
//
//   const SafetensorsReader reader("w.safetensors");
//   reader.verify("w");
//   reader.read("w", 12, second_row);
//
// Data is little-endian, in C order. Python's package `safetensors` reads and
// writes the same format, https://github.com/huggingface/safetensors. This
// reader is stricter in two points: other fields of a tensor and space before
// the header are errors. Of a name that occurs twice the last one counts.
// Dtypes of less than a byte are errors.
//
// Note [Checksums]
// The metadata gets "brigade.crc32.<name>", the CRC-32 of each tensor's data,
// and "brigade.crc32", the CRC-32 of the header. The latter covers the content
// of the header and not its spelling; in Python
//
//   del header["__metadata__"]["brigade.crc32"]
//   for name in header.keys() - {"__metadata__"}:
//       del header[name]["data_offsets"]
//   zlib.crc32(json.dumps(header, sort_keys=True, ensure_ascii=False,
//                         separators=(",", ":")).encode())
//
// so that tools may reorder tensors. A file without checksums is not checked.
//
// Errors: every function throws c10::ValueError "<path>: ..." for a file that
// is damaged, missing or cannot be written.

#ifndef BRIGADE_CHECKPOINT_SAFETENSORS_H_
#define BRIGADE_CHECKPOINT_SAFETENSORS_H_

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace brigade {

struct SafetensorsEntry {
  std::string name;
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::vector<int64_t> shape = {};  // {}: a scalar

  int64_t num_bytes() const;
  friend bool operator==(const SafetensorsEntry&,
                         const SafetensorsEntry&) = default;
};

using SafetensorsMetadata = std::map<std::string, std::string>;

// The format's name of a dtype, "BF16", and back. Throw if there is none.
std::string safetensors_dtype_name(c10::ScalarType dtype);
c10::ScalarType safetensors_dtype(std::string_view name);

// `name` as errors show it: in quotes, escaped and cut to 200 bytes.
std::string quoted_name(std::string_view name);

// CRC-32 of a text whose beginning has CRC-32 `checksum`.
uint32_t extend_checksum(uint32_t checksum, std::span<const std::byte> bytes);

// Writes `<path>.tmp-<16 digits>`, which finish() renames to `path`. Without
// finish() the destructor removes it, and the previous file at `path` stays.
// Only a killed process leaves it.
//
// Thread safety: none. Several writers of one path do not disturb each other.
class SafetensorsWriter {
 public:
  // The data lies in the order of `entries`. List entries with longer elements
  // first to align every tensor to its elements.
  SafetensorsWriter(std::string path, std::vector<SafetensorsEntry> entries,
                    SafetensorsMetadata metadata = {});
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  // Appends bytes of the data. A piece may not cross into the next entry.
  void write(std::span<const std::byte> bytes);

  // Returns once the complete file is at its path, on the disk.
  void finish();

 private:
  const std::string path_;
  const std::vector<SafetensorsEntry> entries_;
  const SafetensorsMetadata metadata_;
  std::vector<uint32_t> checksums_;  // of the data written, by entry
  const int64_t data_begin_;         // in the file
  const std::string temporary_path_;
  const int file_;
  size_t entry_ = 0;          // that is being written
  int64_t in_entry_ = 0;      // bytes of it that are written
  int64_t num_written_ = 0;   // bytes of all entries
  bool is_finished_ = false;  // `temporary_path_` is gone
};

// Thread safety: immutable after construction; any thread may read.
class SafetensorsReader {
 public:
  // Reads the header and checks it: its checksum, and that the tensors fill the
  // file exactly. Reads no data.
  explicit SafetensorsReader(std::string path);
  ~SafetensorsReader();
  SafetensorsReader(const SafetensorsReader&) = delete;
  SafetensorsReader& operator=(const SafetensorsReader&) = delete;

  const std::string& path() const { return path_; }
  // In the order of their data.
  const std::vector<SafetensorsEntry>& entries() const { return entries_; }
  // Without the checksums.
  const SafetensorsMetadata& metadata() const { return metadata_; }
  // CRC-32 of the header, that is, of all checksums in it.
  const std::string& header_checksum() const { return header_checksum_; }

  // nullptr if there is none.
  const SafetensorsEntry* find(std::string_view name) const;

  // Fills `bytes` from byte `offset_bytes` of the tensor, without a check of
  // the checksum.
  void read(std::string_view name, int64_t offset_bytes,
            std::span<std::byte> bytes) const;

  // Reads all data of the tensor and compares it with its checksum.
  void verify(std::string_view name) const;

 private:
  struct Place {
    size_t entry;
    int64_t begin;  // in the file
  };
  const Place& place_of(std::string_view name) const;
  void parse_header(std::string_view text, int64_t data_begin,
                    int64_t num_data_bytes);

  const std::string path_;
  const int file_;
  std::vector<SafetensorsEntry> entries_;
  SafetensorsMetadata metadata_;
  std::string header_checksum_;
  SafetensorsMetadata checksums_;  // by their keys in the metadata
  std::map<std::string, Place, std::less<>> places_;  // by name
};

}  // namespace brigade

#endif  // BRIGADE_CHECKPOINT_SAFETENSORS_H_
