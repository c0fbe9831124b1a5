#include "brigade/fsdp/checkpoint/safetensors_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <random>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "brigade/fsdp/layout/digest.h"

namespace brigade {
namespace {

// The header's length, before it.
constexpr int64_t kLengthBytes = 8;

using Length = std::array<std::byte, kLengthBytes>;  // little-endian

Length to_bytes(uint64_t length) {
  Length bytes;
  for (std::byte& byte : bytes) {
    byte = std::byte(length & 0xff);
    length >>= 8;
  }
  return bytes;
}

uint64_t from_bytes(const Length& bytes) {
  uint64_t length = 0;
  for (size_t b = bytes.size(); b-- > 0;) {
    length = length << 8 | std::to_integer<uint64_t>(bytes[b]);
  }
  return length;
}

// `error` is an errno.
absl::Status system_error(const std::string& path, const std::string& what,
                          int error, const std::string& advice) {
  return absl::Status(
      absl::ErrnoToStatusCode(error),
      absl::StrCat(path, ": cannot ", what, ": ",
                   std::generic_category().message(error), "\n", advice));
}

absl::Status cannot_write(const std::string& path, const std::string& what,
                          int error) {
  return system_error(path, what, error,
                      "Check that its folder exists, can be written and has "
                      "room.");
}

absl::Status damaged(const std::string& path, const std::string& what) {
  return absl::DataLossError(
      absl::StrCat(path, ": ", what,
                   "\nThe file is damaged or no safetensors file; use another "
                   "copy of it."));
}

// Whether `num_bytes` from `offset_bytes` on are bytes of the entry.
absl::Status check_range(const std::string& path, const SafetensorsEntry& entry,
                         int64_t offset_bytes, size_t num_bytes) {
  const int64_t length = entry.num_bytes();
  if (offset_bytes >= 0 && offset_bytes <= length &&
      num_bytes <= static_cast<uint64_t>(length - offset_bytes)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      path, ": tensor ", quoted_name(entry.name), " has ", length,
      " bytes, got a range of ", num_bytes, " from byte ", offset_bytes));
}

// An open file, closed in the end. Its functions return an errno, or 0.
class Descriptor {
 public:
  Descriptor(const std::string& path, int flags)
      : descriptor_(::open(path.c_str(), flags | O_CLOEXEC, 0666)),
        open_error_(descriptor_ < 0 ? errno : 0) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() { close(); }

  int open_error() const { return open_error_; }
  int get() const { return descriptor_; }

  int write(int64_t offset, std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const ssize_t written =
          ::pwrite(descriptor_, bytes.data(), bytes.size(), offset);
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) return errno;
      bytes = bytes.subspan(written);
      offset += written;
    }
    return 0;
  }

  // `bytes` loses those that were read; some stay where the file ends.
  int read(int64_t offset, std::span<std::byte>* bytes) const {
    while (!bytes->empty()) {
      const ssize_t read =
          ::pread(descriptor_, bytes->data(), bytes->size(), offset);
      if (read < 0 && errno == EINTR) continue;
      if (read < 0) return errno;
      if (read == 0) break;
      *bytes = bytes->subspan(read);
      offset += read;
    }
    return 0;
  }

  int sync() {
    while (::fsync(descriptor_) != 0) {
      if (errno != EINTR) return errno;
    }
    return 0;
  }

  int close() {
    const int closed = std::exchange(descriptor_, -1);
    return closed >= 0 && ::close(closed) != 0 ? errno : 0;
  }

 private:
  int descriptor_;
  int open_error_;
};

std::string folder_of(const std::string& path) {
  const std::filesystem::path folder =
      std::filesystem::path(path).parent_path();
  return folder.empty() ? "." : folder.string();
}

}  // namespace

// The file under its temporary name, until it replaces the one at `path`.
class SafetensorsWriter::TemporaryFile {
 public:
  static absl::StatusOr<std::unique_ptr<TemporaryFile>> make(
      const std::string& path) {
    std::random_device random;
    for (;;) {
      const uint64_t number = uint64_t{random()} << 32 | random();
      std::unique_ptr<TemporaryFile> file(new TemporaryFile(
          absl::StrCat(path, ".tmp-", absl::Hex(number, absl::kZeroPad16))));
      const int error = file->descriptor_.open_error();
      if (error == 0) return file;
      file->name_.clear();
      if (error != EEXIST) return cannot_write(path, "make a file", error);
    }
  }

  ~TemporaryFile() {
    if (!name_.empty()) ::unlink(name_.c_str());
  }

  int write(int64_t offset, std::span<const std::byte> bytes) {
    return descriptor_.write(offset, bytes);
  }

  // The order is what makes it safe: the data is on the disk before the name,
  // and the name before anyone is told.
  absl::Status move_to(const std::string& path) {
    if (const int error = descriptor_.sync(); error != 0) {
      return cannot_write(path, "bring it to the disk", error);
    }
    if (const int error = descriptor_.close(); error != 0) {
      return cannot_write(path, "close it", error);
    }
    if (std::rename(name_.c_str(), path.c_str()) != 0) {
      return cannot_write(path, "put it in its place", errno);
    }
    name_.clear();
    Descriptor folder(folder_of(path), O_RDONLY | O_DIRECTORY);
    const int error =
        folder.open_error() != 0 ? folder.open_error() : folder.sync();
    if (error == 0) return absl::OkStatus();
    return cannot_write(path,
                        "bring its folder to the disk, though the new file "
                        "has taken its place",
                        error);
  }

 private:
  explicit TemporaryFile(std::string name)
      : name_(std::move(name)),
        descriptor_(name_, O_WRONLY | O_CREAT | O_EXCL) {}

  std::string name_;  // empty: there is nothing to remove
  Descriptor descriptor_;
};

absl::StatusOr<SafetensorsWriter> SafetensorsWriter::create(
    std::string path, std::vector<SafetensorsEntry> entries,
    SafetensorsMetadata metadata) {
  std::error_code ignored;
  if (path.empty() || std::filesystem::is_directory(path, ignored)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a safetensors file needs the path of a file, got '", path, "'"));
  }
  // Placeholders of the checksums: the data begins behind the header.
  const absl::StatusOr<std::string> header =
      format_header(entries, metadata, std::vector<uint32_t>(entries.size()));
  if (!header.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": ", header.status().message()));
  }
  absl::StatusOr<std::unique_ptr<TemporaryFile>> file =
      TemporaryFile::make(path);
  if (!file.ok()) return file.status();
  const int64_t data_begin =
      kLengthBytes + static_cast<int64_t>(header->size());
  return SafetensorsWriter(std::move(path), std::move(entries),
                           std::move(metadata), data_begin, *std::move(file));
}

SafetensorsWriter::SafetensorsWriter(std::string path,
                                     std::vector<SafetensorsEntry> entries,
                                     SafetensorsMetadata metadata,
                                     int64_t data_begin,
                                     std::unique_ptr<TemporaryFile> file)
    : path_(std::move(path)),
      entries_(std::move(entries)),
      metadata_(std::move(metadata)),
      begins_(data_begins(entries_)),
      data_begin_(data_begin),
      file_(std::move(file)),
      checksums_(entries_.size()) {}

SafetensorsWriter::SafetensorsWriter(SafetensorsWriter&&) noexcept = default;
SafetensorsWriter& SafetensorsWriter::operator=(SafetensorsWriter&&) noexcept =
    default;
SafetensorsWriter::~SafetensorsWriter() = default;

// "byte 4 of tensor 'w'"
std::string SafetensorsWriter::describe_next() const {
  const auto behind = std::ranges::upper_bound(begins_, num_written_);
  if (behind == begins_.end()) return "none";
  const size_t entry = behind - begins_.begin() - 1;
  return absl::StrCat("byte ", num_written_ - begins_[entry], " of tensor ",
                      quoted_name(entries_[entry].name));
}

absl::Status SafetensorsWriter::write(size_t entry, int64_t offset_bytes,
                                      std::span<const std::byte> bytes) {
  if (!closed_.ok()) return closed_;
  if (entry >= entries_.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path_, ": has ", entries_.size(),
                     " tensors, got one of index ", entry));
  }
  if (absl::Status status =
          check_range(path_, entries_[entry], offset_bytes, bytes.size());
      !status.ok()) {
    return status;
  }
  if (begins_[entry] + offset_bytes != num_written_) {
    return absl::FailedPreconditionError(absl::StrCat(
        path_, ": the next byte to write is ", describe_next(), ", got byte ",
        offset_bytes, " of tensor ", quoted_name(entries_[entry].name),
        "\nWrite the tensors in the order given to create()."));
  }
  if (const int error = file_->write(data_begin_ + num_written_, bytes);
      error != 0) {
    return closed_ = cannot_write(
               path_,
               absl::StrCat("write tensor ", quoted_name(entries_[entry].name)),
               error);
  }
  checksums_[entry] = extend_checksum(checksums_[entry], bytes);
  num_written_ += static_cast<int64_t>(bytes.size());
  return absl::OkStatus();
}

absl::Status SafetensorsWriter::finish() {
  if (!closed_.ok()) return closed_;
  if (num_written_ != begins_.back()) {
    return absl::FailedPreconditionError(
        absl::StrCat(path_, ": is not complete: the next byte to write is ",
                     describe_next(), "\nWrite it before finish()."));
  }
  closed_ = absl::FailedPreconditionError(
      absl::StrCat(path_, ": finish() was called; make another writer"));

  const std::string header =
      format_header(entries_, metadata_, checksums_).value();
  int error = file_->write(0, to_bytes(header.size()));
  if (error == 0) {
    error = file_->write(kLengthBytes, std::as_bytes(std::span(header)));
  }
  absl::Status status = error == 0
                            ? file_->move_to(path_)
                            : cannot_write(path_, "write the header", error);
  file_.reset();
  return status;
}

class SafetensorsReader::File : public Descriptor {
 public:
  explicit File(const std::string& path) : Descriptor(path, O_RDONLY) {}
};

absl::StatusOr<SafetensorsReader> SafetensorsReader::open(std::string path) {
  const auto cannot_read = [&](int error) {
    return system_error(path, "read it", error,
                        "Check that the file exists and may be read.");
  };
  auto file = std::make_unique<File>(path);
  if (file->open_error() != 0) return cannot_read(file->open_error());
  struct stat facts;
  if (::fstat(file->get(), &facts) != 0) return cannot_read(errno);
  if (!S_ISREG(facts.st_mode)) {
    return damaged(path, "is no file, but a folder or a device");
  }

  Length length_bytes = {};
  if (facts.st_size < kLengthBytes) {
    return damaged(path, absl::StrCat("must begin with 8 bytes of header "
                                      "length, but has ",
                                      facts.st_size));
  }
  std::span<std::byte> rest = length_bytes;
  if (const int error = file->read(0, &rest); error != 0) {
    return cannot_read(error);
  }
  const uint64_t length = from_bytes(length_bytes);
  const int64_t most =
      std::min<int64_t>(kMostHeaderBytes, facts.st_size - kLengthBytes);
  if (length > static_cast<uint64_t>(most)) {
    return damaged(path,
                   absl::StrCat("says that its header has ", length,
                                " bytes, but it can have at most ", most));
  }
  std::string text(length, '\0');
  rest = std::as_writable_bytes(std::span(text));
  if (const int error = file->read(kLengthBytes, &rest); error != 0) {
    return cannot_read(error);
  }
  const int64_t data_begin = kLengthBytes + static_cast<int64_t>(length);
  absl::StatusOr<SafetensorsHeader> header =
      parse_header(text, facts.st_size - data_begin);
  if (!header.ok())
    return damaged(path, std::string(header.status().message()));
  const uint64_t file_id = Digest().add(facts.st_dev).add(facts.st_ino).value();
  return SafetensorsReader(std::move(path), std::move(file), file_id,
                           data_begin, *std::move(header));
}

SafetensorsReader::SafetensorsReader(std::string path,
                                     std::unique_ptr<File> file,
                                     uint64_t file_id, int64_t data_begin,
                                     SafetensorsHeader header)
    : path_(std::move(path)),
      file_(std::move(file)),
      file_id_(file_id),
      data_begin_(data_begin),
      header_(std::move(header)),
      begins_(data_begins(header_.entries)) {
  for (size_t e = 0; e < entries().size(); ++e) {
    indices_.emplace(entries()[e].name, e);
  }
}

SafetensorsReader::SafetensorsReader(SafetensorsReader&&) noexcept = default;
SafetensorsReader& SafetensorsReader::operator=(SafetensorsReader&&) noexcept =
    default;
SafetensorsReader::~SafetensorsReader() = default;

uint32_t SafetensorsReader::checksum() const {
  uint32_t found = 0;
  const auto add = [&](std::string_view text) {
    found = extend_checksum(found, std::as_bytes(std::span(text)));
  };
  for (size_t i = 0; i < entries().size(); ++i) {
    add(absl::StrCat(entries()[i].name, " ", header_.checksums[i].value_or(0),
                     ";"));
  }
  for (const auto& [key, value] : metadata()) {
    add(absl::StrCat(key, " ", value, ";"));
  }
  return found;
}

const SafetensorsEntry* SafetensorsReader::find(std::string_view name) const {
  const auto found = indices_.find(name);
  return found == indices_.end() ? nullptr : &entries()[found->second];
}

absl::StatusOr<size_t> SafetensorsReader::index_of(
    std::string_view name) const {
  const auto found = indices_.find(name);
  if (found != indices_.end()) return found->second;
  constexpr size_t kMostListed = 5;
  std::vector<std::string> names;
  for (const SafetensorsEntry& entry : entries()) {
    if (names.size() == kMostListed) break;
    names.push_back(quoted_name(entry.name));
  }
  return absl::NotFoundError(absl::StrCat(
      path_, ": has no tensor ", quoted_name(name), ", but ", entries().size(),
      names.empty() ? "" : ": ", absl::StrJoin(names, ", "),
      names.size() < entries().size() ? ", …" : ""));
}

absl::Status SafetensorsReader::read(std::string_view name,
                                     int64_t offset_bytes,
                                     std::span<std::byte> bytes) const {
  const absl::StatusOr<size_t> entry = index_of(name);
  if (!entry.ok()) return entry.status();
  if (absl::Status status =
          check_range(path_, entries()[*entry], offset_bytes, bytes.size());
      !status.ok()) {
    return status;
  }
  return read_entry(*entry, offset_bytes, bytes);
}

absl::Status SafetensorsReader::read_entry(size_t entry, int64_t offset_bytes,
                                           std::span<std::byte> bytes) const {
  const std::string name = quoted_name(entries()[entry].name);
  std::span<std::byte> rest = bytes;
  const int error =
      file_->read(data_begin_ + begins_[entry] + offset_bytes, &rest);
  if (error != 0) {
    return system_error(path_, absl::StrCat("read tensor ", name), error,
                        "Check the disk.");
  }
  if (rest.empty()) return absl::OkStatus();
  return damaged(path_, absl::StrCat("tensor ", name, " has lost its last ",
                                     rest.size(), " bytes since open()"));
}

absl::Status SafetensorsReader::read_whole(std::string_view name,
                                           std::span<std::byte> bytes) const {
  const absl::StatusOr<size_t> entry = index_of(name);
  if (!entry.ok()) return entry.status();
  if (bytes.size() != static_cast<uint64_t>(entries()[*entry].num_bytes())) {
    return absl::InvalidArgumentError(absl::StrCat(
        path_, ": tensor ", quoted_name(name), " has ",
        entries()[*entry].num_bytes(), " bytes, got room for ", bytes.size()));
  }
  if (absl::Status status = read_entry(*entry, 0, bytes); !status.ok()) {
    return status;
  }
  if (!header_.checksums[*entry]) return absl::OkStatus();
  return check_checksum(*entry, extend_checksum(0, bytes));
}

absl::Status SafetensorsReader::verify(std::string_view name) const {
  const absl::StatusOr<size_t> entry = index_of(name);
  if (!entry.ok()) return entry.status();
  return verify_entry(*entry);
}

absl::Status SafetensorsReader::verify() const {
  for (size_t e = 0; e < entries().size(); ++e) {
    if (absl::Status status = verify_entry(e); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status SafetensorsReader::verify_entry(size_t entry) const {
  constexpr int64_t kPieceBytes = 1 << 20;
  if (!header_.checksums[entry]) return absl::OkStatus();
  const int64_t length = entries()[entry].num_bytes();
  std::vector<std::byte> buffer(std::min(length, kPieceBytes));
  uint32_t found = 0;
  for (int64_t offset = 0; offset < length; offset += kPieceBytes) {
    const std::span<std::byte> piece =
        std::span(buffer).first(std::min(length - offset, kPieceBytes));
    if (absl::Status status = read_entry(entry, offset, piece); !status.ok()) {
      return status;
    }
    found = extend_checksum(found, piece);
  }
  return check_checksum(entry, found);
}

absl::Status SafetensorsReader::check_checksum(size_t entry,
                                               uint32_t found) const {
  const std::optional<uint32_t> expected = header_.checksums[entry];
  if (!expected || found == *expected) return absl::OkStatus();
  return damaged(
      path_, absl::StrCat("tensor ", quoted_name(entries()[entry].name),
                          " must have the CRC-32 ",
                          absl::Hex(*expected, absl::kZeroPad8), ", but has ",
                          absl::Hex(found, absl::kZeroPad8)));
}

}  // namespace brigade
