#include "brigade/checkpoint/safetensors.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <set>
#include <system_error>
#include <tuple>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace brigade {
namespace {

using nlohmann::json;

static_assert(std::endian::native == std::endian::little);

constexpr int64_t kLengthBytes = 8;  // of the header's length, before it
constexpr int64_t kMaxHeaderBytes = 100'000'000;  // the format's limit
constexpr int64_t kMaxDataBytes = int64_t{1} << 62;
constexpr char kMetadata[] = "__metadata__";
constexpr char kChecksum[] = "brigade.crc32";

constexpr std::pair<std::string_view, c10::ScalarType> kDtypes[] = {
    {"BOOL", c10::kBool},
    {"U8", c10::kByte},
    {"I8", c10::kChar},
    {"F8_E5M2", c10::kFloat8_e5m2},
    {"F8_E4M3", c10::kFloat8_e4m3fn},
    {"F8_E8M0", c10::kFloat8_e8m0fnu},
    {"F8_E4M3FNUZ", c10::kFloat8_e4m3fnuz},
    {"F8_E5M2FNUZ", c10::kFloat8_e5m2fnuz},
    {"I16", c10::kShort},
    {"U16", c10::kUInt16},
    {"F16", c10::kHalf},
    {"BF16", c10::kBFloat16},
    {"I32", c10::kInt},
    {"U32", c10::kUInt32},
    {"F32", c10::kFloat},
    {"C64", c10::kComplexFloat},
    {"F64", c10::kDouble},
    {"I64", c10::kLong},
    {"U64", c10::kUInt64},
};

template <typename... Parts>
[[noreturn]] void damaged(const std::string& path, const Parts&... parts) {
  TORCH_CHECK_VALUE(false, path, ": ", parts...,
                    "\nThe file is damaged or no safetensors file; use another "
                    "copy of it.");
}

[[noreturn]] void system_error(const std::string& path, const char* doing) {
  const std::string reason = std::generic_category().message(errno);
  TORCH_CHECK_VALUE(false, path, ": cannot ", doing, ": ", reason,
                    "\nCheck that its folder exists, that you may use it, and "
                    "that the disk has room.");
}

std::optional<c10::ScalarType> dtype_named(std::string_view name) {
  for (const auto& [known, dtype] : kDtypes) {
    if (known == name) return dtype;
  }
  return std::nullopt;
}

int open_file(const std::string& path, int flags) {
  const int file = ::open(path.c_str(), flags | O_CLOEXEC, 0666);
  if (file < 0) system_error(path, "open it");
  return file;
}

void write_at(const std::string& path, int file, int64_t offset,
              std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::pwrite(file, bytes.data(), bytes.size(), offset);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) system_error(path, "write it");
    bytes = bytes.subspan(written);
    offset += written;
  }
}

// Throws if the file ends before.
void read_at(const std::string& path, int file, int64_t offset,
             std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t read = ::pread(file, bytes.data(), bytes.size(), offset);
    if (read < 0 && errno == EINTR) continue;
    if (read < 0) system_error(path, "read it");
    if (read == 0) damaged(path, "has lost its last ", bytes.size(), " bytes");
    bytes = bytes.subspan(read);
    offset += read;
  }
}

void sync_file(const std::string& path, int file) {
  while (::fsync(file) != 0) {
    if (errno != EINTR) system_error(path, "bring it to the disk");
  }
}

bool is_utf8(const std::string& text) {
  try {
    json(text).dump();
    return true;
  } catch (const json::type_error&) {
    return false;
  }
}

std::string to_hex(uint32_t checksum) {
  return absl::StrCat(absl::Hex(checksum, absl::kZeroPad8));
}

// Empty if it exceeds 2^62. Multiplies as the format's own reader does: a
// product that overflows before a 0 comes is too large.
std::optional<int64_t> checked_num_bytes(const SafetensorsEntry& entry) {
  int64_t bytes = 1;
  for (const int64_t length : entry.shape) {
    if (length < 0 || __builtin_mul_overflow(bytes, length, &bytes)) {
      return std::nullopt;
    }
  }
  const auto element = static_cast<int64_t>(c10::elementSize(entry.dtype));
  if (__builtin_mul_overflow(bytes, element, &bytes) || bytes > kMaxDataBytes) {
    return std::nullopt;
  }
  return bytes;
}

// "F32 of shape [2, 3]"
std::string form_of(const SafetensorsEntry& entry) {
  return absl::StrCat(safetensors_dtype_name(entry.dtype), " of shape [",
                      absl::StrJoin(entry.shape, ", "), "]");
}

// Note [Checksums]
std::string checksum_of_header(json header) {
  for (auto& [name, value] : header.items()) {
    value.erase(name == kMetadata ? kChecksum : "data_offsets");
  }
  const std::string text = header.dump();
  return to_hex(extend_checksum(0, std::as_bytes(std::span(text))));
}

// The length depends on the number of checksums and not on their values.
std::string format_header(const std::vector<SafetensorsEntry>& entries,
                          const SafetensorsMetadata& metadata,
                          const std::vector<uint32_t>& checksums) {
  json header;
  json& saved = header[kMetadata] = metadata;
  int64_t begin = 0;
  for (size_t e = 0; e < entries.size(); ++e) {
    const SafetensorsEntry& entry = entries[e];
    saved[absl::StrCat(kChecksum, ".", entry.name)] = to_hex(checksums[e]);
    const int64_t end = begin + entry.num_bytes();
    header[entry.name] = {{"dtype", safetensors_dtype_name(entry.dtype)},
                          {"shape", entry.shape},
                          {"data_offsets", {begin, end}}};
    begin = end;
  }
  saved[kChecksum] = checksum_of_header(header);
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  return text;
}

void check_entries(const std::string& path,
                   const std::vector<SafetensorsEntry>& entries,
                   const SafetensorsMetadata& metadata) {
  std::set<std::string_view> names = {kMetadata};
  int64_t total = 0;
  for (const SafetensorsEntry& entry : entries) {
    const std::string name = quoted_name(entry.name);
    TORCH_CHECK_VALUE(is_utf8(entry.name), path, ": the name of tensor ", name,
                      " must be UTF-8");
    TORCH_CHECK_VALUE(names.insert(entry.name).second, path, ": the name ",
                      name, " is used twice or reserved");
    const std::optional<int64_t> bytes = checked_num_bytes(entry);
    TORCH_CHECK_VALUE(bytes && *bytes <= kMaxDataBytes - total, path,
                      ": tensor ", name, ", ", form_of(entry),
                      ", must have dimensions >= 0 and bring the data to at "
                      "most 2^62 bytes");
    total += *bytes;
  }
  for (const auto& [key, value] : metadata) {
    TORCH_CHECK_VALUE(!absl::StartsWith(key, kChecksum), path,
                      ": the metadata key ", quoted_name(key),
                      " is reserved for checksums");
    TORCH_CHECK_VALUE(is_utf8(key) && is_utf8(value), path,
                      ": the metadata of key ", quoted_name(key),
                      " must be UTF-8; encode it, for example in base64");
  }
}

json parse_json(const std::string& path, std::string_view text) {
  // json::parse() takes a NUL for the end.
  if (text.substr(0, 1) != "{" || text.find('\0') != text.npos) {
    damaged(path, "the header must begin with '{' and have no NUL");
  }
  json header = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!header.is_object()) damaged(path, "the header is no valid JSON");
  return header;
}

// Empty if the field is no list of integers from 0 to 2^63 - 1.
std::optional<std::vector<int64_t>> integers_of(const json& fields,
                                                const char* key) {
  const auto found = fields.find(key);
  if (found == fields.end() || !found->is_array()) return std::nullopt;
  std::vector<int64_t> integers;
  for (const json& value : *found) {
    if (!value.is_number_unsigned() ||
        !std::in_range<int64_t>(value.get<uint64_t>())) {
      return std::nullopt;
    }
    integers.push_back(value.get<int64_t>());
  }
  return integers;
}

struct PlacedEntry {
  SafetensorsEntry entry;
  int64_t begin = 0;  // in the data
  int64_t end = 0;
};

PlacedEntry parse_entry(const std::string& path, const std::string& name,
                        const json& fields) {
  const auto wrong = [&](const auto&... parts) {
    damaged(path, "tensor ", quoted_name(name), " ", parts...);
  };
  if (!fields.is_object() || fields.size() != 3) {
    wrong("must have a dtype, shape and data_offsets, and nothing else");
  }
  const auto text = fields.find("dtype");
  const std::optional<c10::ScalarType> dtype =
      text != fields.end() && text->is_string()
          ? dtype_named(text->get<std::string>())
          : std::nullopt;
  if (!dtype) wrong("must have a dtype of the format, of whole bytes");
  const auto shape = integers_of(fields, "shape");
  if (!shape) wrong("must have a shape of integers >= 0");
  const auto offsets = integers_of(fields, "data_offsets");
  if (!offsets || offsets->size() != 2 || (*offsets)[0] > (*offsets)[1]) {
    wrong("must have data_offsets of two integers, 0 <= begin <= end");
  }
  PlacedEntry placed = {
      .entry = {.name = name, .dtype = *dtype, .shape = *shape},
      .begin = (*offsets)[0],
      .end = (*offsets)[1]};
  const std::optional<int64_t> bytes = checked_num_bytes(placed.entry);
  if (bytes != placed.end - placed.begin) {
    wrong("is ", form_of(placed.entry), ", which is ",
          bytes ? absl::StrCat(*bytes) : "more than 2^62",
          " bytes, but has data_offsets [", placed.begin, ", ", placed.end,
          "]");
  }
  return placed;
}

}  // namespace

int64_t SafetensorsEntry::num_bytes() const {
  return checked_num_bytes(*this).value();
}

std::string safetensors_dtype_name(c10::ScalarType dtype) {
  for (const auto& [name, known] : kDtypes) {
    if (known == dtype) return std::string(name);
  }
  TORCH_CHECK_VALUE(false, "safetensors files have no dtype ",
                    c10::toString(dtype));
}

c10::ScalarType safetensors_dtype(std::string_view name) {
  const std::optional<c10::ScalarType> dtype = dtype_named(name);
  TORCH_CHECK_VALUE(dtype, "safetensors files have no dtype ",
                    quoted_name(name));
  return *dtype;
}

std::string quoted_name(std::string_view name) {
  const std::string shown(name.substr(0, 200));
  return absl::StrCat(
      "'", is_utf8(shown) ? absl::Utf8SafeCEscape(shown) : absl::CEscape(shown),
      "'", shown.size() < name.size() ? "..." : "");
}

uint32_t extend_checksum(uint32_t checksum, std::span<const std::byte> bytes) {
  return static_cast<uint32_t>(crc32_z(
      checksum, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size()));
}

SafetensorsWriter::SafetensorsWriter(std::string path,
                                     std::vector<SafetensorsEntry> entries,
                                     SafetensorsMetadata metadata)
    : path_(std::move(path)),
      entries_(std::move(entries)),
      metadata_(std::move(metadata)),
      checksums_(entries_.size()),
      data_begin_([&] {
        check_entries(path_, entries_, metadata_);
        const size_t length =
            format_header(entries_, metadata_, checksums_).size();
        TORCH_CHECK_VALUE(length <= kMaxHeaderBytes, path_,
                          ": the header needs ", length, " bytes, at most ",
                          kMaxHeaderBytes, " are allowed; use several files");
        std::error_code ignored;
        TORCH_CHECK_VALUE(
            !path_.empty() && !std::filesystem::is_directory(path_, ignored),
            "a safetensors file needs the path of a file, got '", path_, "'");
        return kLengthBytes + static_cast<int64_t>(length);
      }()),
      temporary_path_([&] {
        std::random_device random;
        const uint64_t number = uint64_t{random()} << 32 | random();
        return absl::StrCat(path_, ".tmp-",
                            absl::Hex(number, absl::kZeroPad16));
      }()),
      file_(open_file(temporary_path_, O_WRONLY | O_CREAT | O_EXCL)) {}

SafetensorsWriter::~SafetensorsWriter() {
  ::close(file_);
  if (!is_finished_) ::unlink(temporary_path_.c_str());
}

void SafetensorsWriter::write(std::span<const std::byte> bytes) {
  const auto left = [&] { return entries_[entry_].num_bytes() - in_entry_; };
  while (entry_ < entries_.size() && left() == 0) ++entry_, in_entry_ = 0;
  if (bytes.empty()) return;
  const auto length = static_cast<int64_t>(bytes.size());
  TORCH_CHECK_VALUE(
      !is_finished_ && entry_ < entries_.size() && length <= left(), path_,
      ": ", length, " bytes exceed the tensor's end");
  write_at(path_, file_, data_begin_ + num_written_, bytes);
  checksums_[entry_] = extend_checksum(checksums_[entry_], bytes);
  in_entry_ += length;
  num_written_ += length;
}

// The order of these steps makes the replacement safe: the data is on the disk
// before the name, and the name before this returns.
void SafetensorsWriter::finish() {
  write({});
  TORCH_CHECK_VALUE(!is_finished_ && entry_ == entries_.size(), path_,
                    ": finish() needs all data, once");
  const std::string header = format_header(entries_, metadata_, checksums_);
  const uint64_t length = header.size();
  write_at(path_, file_, 0, std::as_bytes(std::span(&length, 1)));
  write_at(path_, file_, kLengthBytes, std::as_bytes(std::span(header)));
  sync_file(path_, file_);
  if (std::rename(temporary_path_.c_str(), path_.c_str()) != 0) {
    system_error(path_, "put the new file in its place");
  }
  is_finished_ = true;
  const std::filesystem::path parent =
      std::filesystem::path(path_).parent_path();
  const int folder =
      open_file(parent.empty() ? "." : parent.string(), O_RDONLY | O_DIRECTORY);
  const absl::Cleanup close_folder = [&] { ::close(folder); };
  sync_file(parent, folder);
}

SafetensorsReader::SafetensorsReader(std::string path)
    : path_(std::move(path)), file_(open_file(path_, O_RDONLY)) {
  absl::Cleanup close_file = [&] { ::close(file_); };
  struct stat facts;
  if (::fstat(file_, &facts) != 0) system_error(path_, "read it");
  if (!S_ISREG(facts.st_mode)) {
    damaged(path_, "is no file, but a folder or a device");
  }
  if (facts.st_size < kLengthBytes) {
    damaged(path_, "must begin with 8 bytes of header length, but has ",
            facts.st_size);
  }
  uint64_t length = 0;
  read_at(path_, file_, 0, std::as_writable_bytes(std::span(&length, 1)));
  const int64_t most =
      std::min<int64_t>(kMaxHeaderBytes, facts.st_size - kLengthBytes);
  if (length > static_cast<uint64_t>(most)) {
    damaged(path_, "says that its header has ", length,
            " bytes, but it can have at most ", most);
  }
  std::string text(length, '\0');
  read_at(path_, file_, kLengthBytes, std::as_writable_bytes(std::span(text)));
  const int64_t data_begin = kLengthBytes + static_cast<int64_t>(length);
  parse_header(text, data_begin, facts.st_size - data_begin);
  std::move(close_file).Cancel();
}

SafetensorsReader::~SafetensorsReader() { ::close(file_); }

void SafetensorsReader::parse_header(std::string_view text, int64_t data_begin,
                                     int64_t num_data_bytes) {
  const json header = parse_json(path_, text);
  std::vector<PlacedEntry> placed;
  for (const auto& [name, fields] : header.items()) {
    if (name == kMetadata) continue;
    placed.push_back(parse_entry(path_, name, fields));
  }
  std::ranges::stable_sort(placed, {}, [](const PlacedEntry& p) {
    return std::tuple(p.begin, p.end);
  });
  int64_t end = 0;
  for (PlacedEntry& next : placed) {
    if (next.begin != end || next.end > num_data_bytes) {
      damaged(path_, "tensor ", quoted_name(next.entry.name),
              " must begin at byte ", end, " of the data and end by byte ",
              num_data_bytes, ", but has data_offsets [", next.begin, ", ",
              next.end, "]");
    }
    end = next.end;
    places_.emplace(next.entry.name,
                    Place{entries_.size(), data_begin + next.begin});
    entries_.push_back(std::move(next.entry));
  }
  if (end < num_data_bytes) {
    damaged(path_, "the data must end at byte ", end,
            ", after the last tensor, but the file ends at ", num_data_bytes);
  }
  if (const auto metadata = header.find(kMetadata); metadata != header.end()) {
    if (!metadata->is_object()) {
      damaged(path_, "__metadata__ must be an object");
    }
    for (const auto& [key, value] : metadata->items()) {
      if (!value.is_string()) {
        damaged(path_, "__metadata__ must have text as ", quoted_name(key));
      }
      (absl::StartsWith(key, kChecksum) ? checksums_ : metadata_)
          .emplace(key, value);
    }
  }
  header_checksum_ = checksum_of_header(header);
  if (!checksums_.empty() && checksums_[kChecksum] != header_checksum_) {
    damaged(path_, "the header must have the CRC-32 ",
            quoted_name(checksums_[kChecksum]), ", but has ", header_checksum_);
  }
}

const SafetensorsEntry* SafetensorsReader::find(std::string_view name) const {
  const auto found = places_.find(name);
  return found == places_.end() ? nullptr : &entries_[found->second.entry];
}

const SafetensorsReader::Place& SafetensorsReader::place_of(
    std::string_view name) const {
  const auto found = places_.find(name);
  TORCH_CHECK_VALUE(found != places_.end(), path_, ": has no tensor ",
                    quoted_name(name));
  return found->second;
}

void SafetensorsReader::read(std::string_view name, int64_t offset_bytes,
                             std::span<std::byte> bytes) const {
  const Place& place = place_of(name);
  const int64_t length = entries_[place.entry].num_bytes();
  TORCH_CHECK_VALUE(
      offset_bytes >= 0 && offset_bytes <= length &&
          bytes.size() <= static_cast<uint64_t>(length - offset_bytes),
      path_, ": tensor ", quoted_name(name), " has ", length,
      " bytes, got a range of ", bytes.size(), " from byte ", offset_bytes);
  read_at(path_, file_, place.begin + offset_bytes, bytes);
}

void SafetensorsReader::verify(std::string_view name) const {
  constexpr int64_t kPieceBytes = 1 << 20;
  const int64_t length = entries_[place_of(name).entry].num_bytes();
  const auto expected =
      checksums_.find(absl::StrCat(kChecksum, ".", std::string(name)));
  if (expected == checksums_.end()) return;
  std::vector<std::byte> buffer(std::min(length, kPieceBytes));
  uint32_t found = 0;
  for (int64_t offset = 0; offset < length; offset += kPieceBytes) {
    const std::span<std::byte> piece =
        std::span(buffer).first(std::min(length - offset, kPieceBytes));
    read(name, offset, piece);
    found = extend_checksum(found, piece);
  }
  if (to_hex(found) != expected->second) {
    damaged(path_, "tensor ", quoted_name(name), " must have the CRC-32 ",
            expected->second, ", but has ", to_hex(found));
  }
}

}  // namespace brigade
