#include "brigade/checkpoint/safetensors.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <random>
#include <system_error>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace brigade {
namespace {

using nlohmann::json;

static_assert(std::endian::native == std::endian::little);

constexpr int64_t kLengthBytes = 8;  // size of the header length field
constexpr int64_t kMaxHeaderBytes = 100'000'000;  // the format's limit
constexpr int64_t kMaxDataBytes = int64_t{1} << 62;
constexpr char kMetadata[] = "__metadata__";
constexpr char kChecksum[] = "brigade.crc32";
constexpr std::string_view kNoChecksum = "00000000";

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
                    "\nThe file is damaged or not a safetensors file; use "
                    "another copy of it.");
}

void check_errno(bool is_good, const std::string& path, const char* doing) {
  TORCH_CHECK_VALUE(is_good, path, ": cannot ", doing, ": ",
                    std::generic_category().message(errno),
                    "\nCheck that its folder exists, that you have permission, "
                    "and that the disk has space.");
}

void sync_to_disk(const std::string& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  const bool is_synced = file >= 0 && ::fsync(file) == 0;
  if (file >= 0) ::close(file);
  check_errno(is_synced, path, "sync it to disk");
}

// Returns the name quoted, escaped and cut to 200 bytes.
std::string shown_name(std::string_view name) {
  return absl::StrCat("'", absl::CEscape(std::string(name.substr(0, 200))),
                      "'");
}

uint32_t extend_checksum(uint32_t checksum, std::span<const std::byte> bytes) {
  return static_cast<uint32_t>(crc32_z(
      checksum, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size()));
}

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text));
}

std::string to_hex(uint32_t checksum) {
  return absl::StrCat(absl::Hex(checksum, absl::kZeroPad8));
}

// Returns the offset of the checksum's digits. A search for the quoted key is
// enough, because JSON escapes quotes within texts.
size_t offset_of_digits(std::string_view head, std::string_view digits) {
  const std::string key = absl::StrCat("\"", kChecksum, "\":\"");
  const size_t begin = head.find(absl::StrCat(key, std::string(digits), "\""));
  return begin == head.npos ? begin : begin + key.size();
}

// Returns nullopt above 2^62. An overflow counts as too large even if a later
// dimension is 0, as in the format's own reader.
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

std::string make_head(const std::string& path,
                      const std::vector<SafetensorsEntry>& entries,
                      const SafetensorsMetadata& metadata) {
  json header;
  header[kMetadata] = metadata;
  header[kMetadata][kChecksum] = kNoChecksum;
  int64_t begin = 0;
  for (const SafetensorsEntry& entry : entries) {
    TORCH_CHECK_VALUE(!header.contains(entry.name), path, ": the name ",
                      shown_name(entry.name), " is used twice or reserved");
    header[entry.name] = {{"dtype", safetensors_dtype_name(entry.dtype)},
                          {"shape", entry.shape},
                          {"data_offsets", {begin, begin + entry.num_bytes()}}};
    begin += entry.num_bytes();
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const json::type_error& error) {
    TORCH_CHECK_VALUE(false, path,
                      ": names and metadata must be UTF-8; encode "
                      "them, for example in base64: ",
                      error.what());
  }
  text.resize((text.size() + 7) / 8 * 8, ' ');
  TORCH_CHECK_VALUE(text.size() <= kMaxHeaderBytes, path, ": the header needs ",
                    text.size(), " bytes, the format allows ", kMaxHeaderBytes,
                    "; use several files");
  const uint64_t length = text.size();
  text.insert(0, reinterpret_cast<const char*>(&length), kLengthBytes);
  return text;
}

std::string temporary_path_of(const std::string& path) {
  std::error_code ignored;
  TORCH_CHECK_VALUE(
      !path.empty() && !std::filesystem::is_directory(path, ignored),
      "expected the path of a safetensors file, got '", path, "'");
  std::random_device random;
  const uint64_t number = uint64_t{random()} << 32 | random();
  return absl::StrCat(path, ".tmp-", absl::Hex(number, absl::kZeroPad16));
}

json parse_json(const std::string& path, std::string_view text) {
  // json::parse() stops at a NUL.
  if (text.substr(0, 1) != "{" || text.find('\0') != text.npos) {
    damaged(path, "the header must begin with '{' and contain no NUL");
  }
  json header = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!header.is_object()) damaged(path, "the header is not valid JSON");
  return header;
}

// Returns false unless the field is a list of integers from 0 to 2^63 - 1.
bool read_integers(const json& fields, const char* key,
                   std::vector<int64_t>& integers) {
  const auto found = fields.find(key);
  if (found == fields.end() || !found->is_array()) return false;
  for (const json& value : *found) {
    if (!value.is_number_unsigned() ||
        !std::in_range<int64_t>(value.get<uint64_t>())) {
      return false;
    }
    integers.push_back(value.get<int64_t>());
  }
  return true;
}

// `begin` of the result is relative to the data.
SafetensorsEntry parse_entry(const std::string& path, const std::string& name,
                             const json& fields) {
  SafetensorsEntry entry = {.name = name};
  std::vector<int64_t> offsets;
  std::optional<c10::ScalarType> dtype;
  if (fields.is_object() && fields.size() == 3 && fields.contains("dtype") &&
      fields["dtype"].is_string()) {
    dtype = safetensors_dtype(fields["dtype"].get<std::string>());
  }
  if (!dtype || !read_integers(fields, "shape", entry.shape) ||
      !read_integers(fields, "data_offsets", offsets) || offsets.size() != 2) {
    damaged(path, "tensor ", shown_name(name),
            " must have exactly a dtype of whole bytes, a shape and two "
            "data_offsets, all integers >= 0");
  }
  entry.dtype = *dtype;
  entry.begin = offsets[0];
  const std::optional<int64_t> bytes = checked_num_bytes(entry);
  if (bytes != offsets[1] - offsets[0]) {
    damaged(path, "tensor ", shown_name(name), " is ",
            safetensors_dtype_name(entry.dtype), " of shape [",
            absl::StrJoin(entry.shape, ", "), "], which is ",
            bytes ? absl::StrCat(*bytes) : "more than 2^62",
            " bytes, but has data_offsets [", offsets[0], ", ", offsets[1],
            "]");
  }
  return entry;
}

SafetensorsMetadata parse_metadata(const std::string& path,
                                   const json& header) {
  // By iterator: copying deeply nested JSON would overflow the stack.
  const auto found = header.find(kMetadata);
  if (found == header.end()) return {};
  try {
    return found->get<SafetensorsMetadata>();
  } catch (const json::type_error&) {
    damaged(path, "__metadata__ must be an object of strings");
  }
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

std::optional<c10::ScalarType> safetensors_dtype(std::string_view name) {
  for (const auto& [known, dtype] : kDtypes) {
    if (known == name) return dtype;
  }
  return std::nullopt;
}

SafetensorsWriter::SafetensorsWriter(
    std::string path, const std::vector<SafetensorsEntry>& entries,
    const SafetensorsMetadata& metadata)
    : path_(std::move(path)),
      head_(make_head(path_, entries, metadata)),
      temporary_path_(temporary_path_of(path_)),
      file_(temporary_path_, std::ios::binary) {
  check_errno(file_.good(), path_, "open it");
  file_ << head_;
  checksum_ = extend_checksum(0, bytes_of(head_));
  for (const SafetensorsEntry& entry : entries) {
    num_missing_ += entry.num_bytes();
  }
}

SafetensorsWriter::~SafetensorsWriter() {
  if (!is_finished_) ::unlink(temporary_path_.c_str());
}

void SafetensorsWriter::write(std::span<const std::byte> bytes) {
  const auto length = static_cast<int64_t>(bytes.size());
  file_.write(reinterpret_cast<const char*>(bytes.data()), length);
  check_errno(file_.good(), path_, "write it");
  checksum_ = extend_checksum(checksum_, bytes);
  num_missing_ -= length;
}

// Syncs the data before the rename, and the rename before returning.
void SafetensorsWriter::finish() {
  TORCH_CHECK_VALUE(!is_finished_ && num_missing_ == 0, path_,
                    ": call finish() once, after all data is written");
  const size_t begin = offset_of_digits(head_, kNoChecksum);
  file_.seekp(static_cast<std::streamoff>(begin)) << to_hex(checksum_);
  file_.close();
  check_errno(file_.good(), path_, "write it");
  sync_to_disk(temporary_path_);
  check_errno(std::rename(temporary_path_.c_str(), path_.c_str()) == 0, path_,
              "rename the new file to it");
  is_finished_ = true;
  const std::string folder = std::filesystem::path(path_).parent_path();
  sync_to_disk(folder.empty() ? "." : folder);
}

SafetensorsReader::SafetensorsReader(std::string path)
    : path_(std::move(path)), file_(path_, std::ios::binary) {
  check_errno(file_.good(), path_, "open it");
  if (!std::filesystem::is_regular_file(path_)) {
    damaged(path_, "is a folder or a device");
  }
  num_bytes_ = file_.seekg(0, std::ios::end).tellg();
  if (num_bytes_ < kLengthBytes) {
    damaged(path_, "must begin with 8 bytes of header length, but has ",
            num_bytes_);
  }
  uint64_t length = 0;
  read_at(0, std::as_writable_bytes(std::span(&length, 1)));
  const int64_t most = std::min(kMaxHeaderBytes, num_bytes_ - kLengthBytes);
  if (length > static_cast<uint64_t>(most)) {
    damaged(path_, "says that its header has ", length,
            " bytes, but it can have at most ", most);
  }
  const auto data_begin = kLengthBytes + static_cast<int64_t>(length);
  std::string head(data_begin, '\0');
  read_at(0, std::as_writable_bytes(std::span(head)));
  const json header =
      parse_json(path_, std::string_view(head).substr(kLengthBytes));
  for (const auto& [name, fields] : header.items()) {
    if (name != kMetadata) {
      entries_.emplace(name, parse_entry(path_, name, fields));
    }
  }
  place_entries(data_begin);
  metadata_ = parse_metadata(path_, header);
  header_checksum_ = to_hex(extend_checksum(0, bytes_of(head)));
  verify(head);
  metadata_.erase(kChecksum);
}

void SafetensorsReader::read_at(int64_t offset, std::span<std::byte> bytes) {
  file_.seekg(offset);
  file_.read(reinterpret_cast<char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
  if (file_.eof()) damaged(path_, "is shorter than when it was opened");
  check_errno(file_.good(), path_, "read it");
}

// Checks that the tensors fill the data, and makes `begin` relative to the
// file.
void SafetensorsReader::place_entries(int64_t data_begin) {
  std::vector<SafetensorsEntry*> placed;
  for (auto& [name, entry] : entries_) placed.push_back(&entry);
  std::ranges::sort(placed, {}, [](const SafetensorsEntry* entry) {
    return std::pair(entry->begin, entry->num_bytes());
  });
  const int64_t num_data_bytes = num_bytes_ - data_begin;
  int64_t end = 0;
  for (SafetensorsEntry* const next : placed) {
    const int64_t num_bytes = next->num_bytes();
    if (next->begin != end || num_bytes > num_data_bytes - end) {
      damaged(path_, "tensor ", shown_name(next->name), " must begin at byte ",
              end, " of the data and end by byte ", num_data_bytes,
              ", but has data_offsets [", next->begin, ", ",
              next->begin + num_bytes, "]");
    }
    end += num_bytes;
    next->begin += data_begin;
  }
  if (end < num_data_bytes) {
    damaged(path_, "the data must end at byte ", end,
            ", after the last tensor, but the file ends at ", num_data_bytes);
  }
}

void SafetensorsReader::verify(std::string head) {
  constexpr int64_t kPieceBytes = 1 << 20;
  const auto expected = metadata_.find(kChecksum);
  if (expected == metadata_.end()) return;
  const size_t begin = offset_of_digits(head, expected->second);
  if (begin != head.npos) head.replace(begin, kNoChecksum.size(), kNoChecksum);
  uint32_t found = extend_checksum(0, bytes_of(head));
  std::vector<std::byte> buffer(std::min(num_bytes_, kPieceBytes));
  for (auto offset = static_cast<int64_t>(head.size()); offset < num_bytes_;
       offset += kPieceBytes) {
    const auto piece =
        std::span(buffer).first(std::min(num_bytes_ - offset, kPieceBytes));
    read_at(offset, piece);
    found = extend_checksum(found, piece);
  }
  if (to_hex(found) != expected->second) {
    damaged(path_, "expected the CRC-32 ", shown_name(expected->second),
            ", found ", to_hex(found));
  }
}

void SafetensorsReader::read(std::string_view name, int64_t offset_bytes,
                             std::span<std::byte> bytes) {
  const auto entry = entries_.find(name);
  TORCH_CHECK_VALUE(entry != entries_.end(), path_, ": has no tensor ",
                    shown_name(name));
  const int64_t length = entry->second.num_bytes();
  TORCH_CHECK_VALUE(
      offset_bytes >= 0 && offset_bytes <= length &&
          bytes.size() <= static_cast<uint64_t>(length - offset_bytes),
      path_, ": tensor ", shown_name(name), " has ", length,
      " bytes, got a range of ", bytes.size(), " from byte ", offset_bytes);
  read_at(entry->second.begin + offset_bytes, bytes);
}

}  // namespace brigade
