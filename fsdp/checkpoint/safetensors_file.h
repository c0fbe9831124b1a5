// Files in the safetensors format: named tensors in one file, written piece by
// piece, read in part, and checked before they are believed.
//
// Decides when a file is in order, and when it replaces the one before. Does
// not know tensors: data is bytes, little-endian and in C order, as it lies in
// the file. The format's Python package reads what is written here, and the
// other way round; safetensors_header.h says where the two differ, and which
// checksums a file has.
//
// Example:
//
//   absl::StatusOr<SafetensorsWriter> writer = SafetensorsWriter::create(
//       "model.safetensors",
//       {{.name = "weight", .dtype = SafetensorsDtype::kF32, .shape = {4, 3}}},
//       {{"step", "17"}});
//   writer->write(0, 0, first_half);
//   writer->write(0, 24, second_half);
//   writer->finish();
//
//   absl::StatusOr<SafetensorsReader> reader =
//       SafetensorsReader::open("model.safetensors");
//   reader->verify();
//   reader->read("weight", 12, second_row);

#ifndef BRIGADE_FSDP_CHECKPOINT_SAFETENSORS_FILE_H_
#define BRIGADE_FSDP_CHECKPOINT_SAFETENSORS_FILE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "brigade/fsdp/checkpoint/safetensors_header.h"

namespace brigade {

// Writes under a temporary name beside the path, `<path>.tmp-<16 digits>`.
// finish() puts it in the path's place in one step; without it the temporary
// file goes and the file before stays. Only a killed process leaves one behind.
//
// Thread safety: none. Several writers of one path do not disturb each other;
// the last to finish stays.
class SafetensorsWriter {
 public:
  // Data lies in the order of `entries`. Entries of longer elements first keep
  // every tensor aligned to its elements, for readers that map the file.
  //
  // Errors:
  //   InvalidArgument  as format_header(), or `path` is empty or a folder.
  //   other            the system's, for a file that cannot be made.
  static absl::StatusOr<SafetensorsWriter> create(
      std::string path, std::vector<SafetensorsEntry> entries,
      SafetensorsMetadata metadata = {});

  SafetensorsWriter(SafetensorsWriter&&) noexcept;
  SafetensorsWriter& operator=(SafetensorsWriter&&) noexcept;
  ~SafetensorsWriter();

  const std::vector<SafetensorsEntry>& entries() const { return entries_; }

  // The next bytes: those at `offset_bytes` of entries()[entry]. All before
  // must be written. An entry without elements needs no call and allows one.
  //
  // Errors:
  //   InvalidArgument     there is no such entry, or it has no such bytes.
  //   FailedPrecondition  it is not its turn, or finish() was called.
  //   other               the system's; nothing can be written behind one.
  absl::Status write(size_t entry, int64_t offset_bytes,
                     std::span<const std::byte> bytes);

  // When it returns Ok, the file is complete at its path, on the disk.
  //
  // Errors:
  //   FailedPrecondition  not all is written yet, or finish() was called.
  //   other               the system's. The file before is intact, unless the
  //                       message says that the new one has taken its place.
  absl::Status finish();

 private:
  class TemporaryFile;

  SafetensorsWriter(std::string path, std::vector<SafetensorsEntry> entries,
                    SafetensorsMetadata metadata, int64_t data_begin,
                    std::unique_ptr<TemporaryFile> file);

  std::string describe_next() const;

  // Constant after construction
  std::string path_;
  std::vector<SafetensorsEntry> entries_;
  SafetensorsMetadata metadata_;
  std::vector<int64_t> begins_;  // in the data, by entry; then the data's end
  int64_t data_begin_;           // in the file

  std::unique_ptr<TemporaryFile> file_;
  int64_t num_written_ = 0;          // bytes of data
  std::vector<uint32_t> checksums_;  // of what is written, by entry
  absl::Status closed_;              // why nothing more can be written, or Ok
};

// Thread safety: immutable after open(); any thread may read.
class SafetensorsReader {
 public:
  // Reads the header and checks all of it: its own checksum, and that the
  // tensors fill the file exactly. Of the data it reads nothing.
  //
  // Errors:
  //   NotFound  there is no such file.
  //   DataLoss  the file is cut short, damaged or in another format.
  //   other     the system's, for a file that cannot be read.
  static absl::StatusOr<SafetensorsReader> open(std::string path);

  SafetensorsReader(SafetensorsReader&&) noexcept;
  SafetensorsReader& operator=(SafetensorsReader&&) noexcept;
  ~SafetensorsReader();

  // In the order of their data.
  const std::vector<SafetensorsEntry>& entries() const {
    return header_.entries;
  }

  // Without the checksums.
  const SafetensorsMetadata& metadata() const { return header_.metadata; }
  // Of names, metadata and the data's own checksums, as far as the file has
  // them: other contents have another one.
  uint32_t checksum() const;

  // Of the file that was opened: on one host no other one has it.
  uint64_t file_id() const { return file_id_; }

  // nullptr if there is none. Valid as long as the reader.
  const SafetensorsEntry* find(std::string_view name) const;

  // Fills `bytes` from byte `offset_bytes` of the tensor. Checks no checksum.
  //
  // Errors:
  //   NotFound         there is no such tensor.
  //   InvalidArgument  it has no such bytes.
  //   DataLoss         the file has become shorter since open().
  //   other            the system's.
  absl::Status read(std::string_view name, int64_t offset_bytes,
                    std::span<std::byte> bytes) const;

  // Fills `bytes` with all data of the tensor, and compares the checksum.
  //
  // Errors: as read() and verify().
  absl::Status read_whole(std::string_view name,
                          std::span<std::byte> bytes) const;

  // Reads all data of one tensor, or of all, and compares the checksum. Ok for
  // a tensor that has none: others write files too.
  //
  // Errors: as read(), and
  //   DataLoss  the data is not what was written.
  absl::Status verify(std::string_view name) const;
  absl::Status verify() const;

 private:
  class File;

  SafetensorsReader(std::string path, std::unique_ptr<File> file,
                    uint64_t file_id, int64_t data_begin,
                    SafetensorsHeader header);

  absl::StatusOr<size_t> index_of(std::string_view name) const;
  absl::Status read_entry(size_t entry, int64_t offset_bytes,
                          std::span<std::byte> bytes) const;
  absl::Status verify_entry(size_t entry) const;
  absl::Status check_checksum(size_t entry, uint32_t found) const;

  // Constant after construction
  std::string path_;
  std::unique_ptr<File> file_;
  uint64_t file_id_;
  int64_t data_begin_;  // in the file
  SafetensorsHeader header_;
  std::vector<int64_t> begins_;  // in the data, by entry; then the data's end
  std::map<std::string, size_t, std::less<>> indices_;  // of entries, by name
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_CHECKPOINT_SAFETENSORS_FILE_H_
