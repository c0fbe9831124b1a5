#include "brigade/fsdp/checkpoint/safetensors_header.h"

#include <zlib.h>

#include <algorithm>
#include <charconv>
#include <functional>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace brigade {
namespace {

using nlohmann::json;

constexpr int64_t kMostDataBytes = int64_t{1} << 62;
constexpr char kMetadata[] = "__metadata__";
constexpr char kChecksum[] = "brigade.crc32";
constexpr size_t kChecksumDigits = 8;

struct Dtype {
  std::string_view name;
  int64_t bytes;
};

// By SafetensorsDtype.
constexpr Dtype kDtypes[] = {
    {"BOOL", 1},    {"U8", 1},      {"I8", 1},          {"F8_E5M2", 1},
    {"F8_E4M3", 1}, {"F8_E8M0", 1}, {"F8_E4M3FNUZ", 1}, {"F8_E5M2FNUZ", 1},
    {"I16", 2},     {"U16", 2},     {"F16", 2},         {"BF16", 2},
    {"I32", 4},     {"U32", 4},     {"F32", 4},         {"C64", 8},
    {"F64", 8},     {"I64", 8},     {"U64", 8},
};
static_assert(std::size(kDtypes) ==
              static_cast<size_t>(SafetensorsDtype::kU64) + 1);

std::string checksum_key(const std::string& name) {
  return absl::StrCat(kChecksum, ".", name);
}

std::string to_hex(uint32_t checksum) {
  return absl::StrCat(absl::Hex(checksum, absl::kZeroPad8));
}

std::optional<uint32_t> from_hex(std::string_view text) {
  uint32_t checksum = 0;
  const char* const end = text.data() + text.size();
  const auto [behind, error] = std::from_chars(text.data(), end, checksum, 16);
  if (text.size() != kChecksumDigits || behind != end || error != std::errc()) {
    return std::nullopt;
  }
  return checksum;
}

bool is_utf8(const std::string& text) {
  try {
    json(text).dump();
    return true;
  } catch (const json::type_error&) {
    return false;
  }
}

std::string list_of_dtypes() {
  std::vector<std::string> names;
  for (const Dtype& dtype : kDtypes) names.emplace_back(dtype.name);
  return absl::StrJoin(names, ", ");
}

// "F32 of shape [2, 3]"
std::string describe_type(const SafetensorsEntry& entry) {
  return absl::StrCat(dtype_name(entry.dtype), " of shape [",
                      absl::StrJoin(entry.shape, ", "), "]");
}

// Empty if it exceeds kMostDataBytes. Multiplies as the format's own reader
// does: a product that overflows before a 0 comes is too large there too.
std::optional<int64_t> checked_num_bytes(const SafetensorsEntry& entry) {
  int64_t bytes = 1;
  for (const int64_t dimension : entry.shape) {
    if (__builtin_mul_overflow(bytes, dimension, &bytes)) return std::nullopt;
  }
  if (__builtin_mul_overflow(bytes, dtype_bytes(entry.dtype), &bytes) ||
      bytes > kMostDataBytes) {
    return std::nullopt;
  }
  return bytes;
}

absl::Status too_large(const SafetensorsEntry& entry) {
  return absl::InvalidArgumentError(absl::StrCat(
      "tensor ", quoted_name(entry.name), ", ", describe_type(entry),
      ", brings the data to more than 2^62 bytes; use several files"));
}

absl::Status validate(std::span<const SafetensorsEntry> entries,
                      const SafetensorsMetadata& metadata) {
  std::set<std::string_view> names;
  int64_t total = 0;
  for (const SafetensorsEntry& entry : entries) {
    const std::string name = quoted_name(entry.name);
    if (entry.name == kMetadata) {
      return absl::InvalidArgumentError(absl::StrCat(
          "a tensor cannot have the name ", name,
          ", which the format keeps for the metadata; name it otherwise"));
    }
    if (!is_utf8(entry.name)) {
      return absl::InvalidArgumentError(
          absl::StrCat("the name of tensor ", name, " must be UTF-8"));
    }
    if (!names.insert(entry.name).second) {
      return absl::InvalidArgumentError(absl::StrCat(
          "two tensors have the name ", name, "; give each its own"));
    }
    if (std::ranges::any_of(entry.shape, [](int64_t d) { return d < 0; })) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor ", name, " must have dimensions >= 0, got ",
                       describe_type(entry)));
    }
    const std::optional<int64_t> bytes = checked_num_bytes(entry);
    if (!bytes || *bytes > kMostDataBytes - total) return too_large(entry);
    total += *bytes;
  }
  for (const auto& [key, value] : metadata) {
    if (absl::StartsWith(key, kChecksum)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the metadata key ", quoted_name(key), " begins with ", kChecksum,
          ", which is kept for checksums; name it otherwise"));
    }
    if (!is_utf8(key) || !is_utf8(value)) {
      return absl::InvalidArgumentError(
          absl::StrCat("the metadata of key ", quoted_name(key),
                       " must be UTF-8; encode it, for example in base64"));
    }
  }
  return absl::OkStatus();
}

// Note [Checksums]
uint32_t checksum_of(json header) {
  for (auto& [name, value] : header.items()) {
    value.erase(name == kMetadata ? kChecksum : "data_offsets");
  }
  const std::string text = header.dump();
  return extend_checksum(0, std::as_bytes(std::span(text)));
}

std::string text_of_header(std::span<const SafetensorsEntry> entries,
                           json metadata, uint32_t header_checksum) {
  metadata[kChecksum] = to_hex(header_checksum);
  std::string text = absl::StrCat("{\"", kMetadata, "\":", metadata.dump());
  const std::vector<int64_t> begins = data_begins(entries);
  for (size_t e = 0; e < entries.size(); ++e) {
    absl::StrAppend(&text, ",", json(entries[e].name).dump(), ":{\"dtype\":\"",
                    dtype_name(entries[e].dtype), "\",\"shape\":[",
                    absl::StrJoin(entries[e].shape, ","),
                    "],\"data_offsets\":[", begins[e], ",", begins[e + 1],
                    "]}");
  }
  text += '}';
  text.resize((text.size() + 7) / 8 * 8, ' ');
  return text;
}

absl::Status damaged_header(const std::string& what) {
  return absl::DataLossError(absl::StrCat("the header ", what));
}

absl::Status damaged_tensor(const std::string& name, const std::string& what) {
  return absl::DataLossError(
      absl::StrCat("tensor ", quoted_name(name), " ", what));
}

struct ParsedJson {
  json header;
  std::map<std::string, size_t> positions;  // of the names, in the text
};

// json::parse() keeps the last of equal names, and takes any depth and a NUL
// for the end.
absl::StatusOr<ParsedJson> parse_json(std::string_view text) {
  if (text.substr(0, 1) != "{" || text.find('\0') != text.npos) {
    return damaged_header("must begin with '{' and have no NUL");
  }
  ParsedJson parsed;
  std::string name;              // of the tensor, or kMetadata
  std::set<std::string> fields;  // of it
  absl::Status problem;
  const auto watch = [&](int depth, json::parse_event_t event, json& value) {
    if (event == json::parse_event_t::key && depth <= 2) {
      const std::string& key = value.get_ref<const std::string&>();
      if (depth == 1) {
        name = key;
        fields.clear();
        if (!parsed.positions.emplace(name, parsed.positions.size()).second) {
          problem.Update(damaged_tensor(name, "is in the header twice"));
        }
      } else if (!fields.insert(key).second) {
        problem.Update(damaged_tensor(
            name, absl::StrCat("has ", quoted_name(key), " twice")));
      }
    }
    const bool opens = event == json::parse_event_t::object_start ||
                       event == json::parse_event_t::array_start;
    if (!opens || depth <= 2) return true;
    problem.Update(damaged_tensor(name, "has lists in lists in the header"));
    return false;
  };
  parsed.header = json::parse(text, watch, /*allow_exceptions=*/false);
  if (!problem.ok()) return problem;
  if (!parsed.header.is_object()) return damaged_header("is no valid JSON");
  return parsed;
}

// "" if it is no text.
std::string text_of_field(const json& fields, const char* key) {
  const auto found = fields.find(key);
  if (found == fields.end() || !found->is_string()) return "";
  return found->get<std::string>();
}

// Empty if it is no list of integers from 0 to 2^63 - 1.
std::optional<std::vector<int64_t>> integers_of_field(const json& fields,
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
  size_t position = 0;  // in the header; orders entries without elements
};

absl::StatusOr<PlacedEntry> parse_entry(const std::string& name,
                                        const json& fields, size_t position) {
  if (!fields.is_object()) {
    return damaged_tensor(name, "must have a dtype, a shape and data_offsets");
  }
  const std::string dtype_text = text_of_field(fields, "dtype");
  const auto dtype = std::ranges::find(kDtypes, dtype_text, &Dtype::name);
  if (dtype == std::end(kDtypes)) {
    return damaged_tensor(
        name, absl::StrCat("must have a dtype of ", list_of_dtypes(), ", got ",
                           quoted_name(dtype_text)));
  }
  std::optional<std::vector<int64_t>> shape =
      integers_of_field(fields, "shape");
  if (!shape) {
    return damaged_tensor(name, "must have a shape of integers >= 0");
  }
  const std::optional<std::vector<int64_t>> offsets =
      integers_of_field(fields, "data_offsets");
  if (!offsets || offsets->size() != 2 || (*offsets)[0] > (*offsets)[1]) {
    return damaged_tensor(
        name, "must have data_offsets of two integers, 0 <= begin <= end");
  }
  PlacedEntry placed = {
      .entry = {.name = name,
                .dtype = SafetensorsDtype(dtype - std::begin(kDtypes)),
                .shape = *std::move(shape)},
      .begin = (*offsets)[0],
      .end = (*offsets)[1],
      .position = position};
  const std::optional<int64_t> bytes = checked_num_bytes(placed.entry);
  if (bytes != placed.end - placed.begin) {
    return damaged_tensor(
        name, absl::StrCat("is ", describe_type(placed.entry), ", which is ",
                           bytes ? absl::StrCat(*bytes) : "more than 2^62",
                           " bytes, but has data_offsets [", placed.begin, ", ",
                           placed.end, "]"));
  }
  return placed;
}

// Whether the tensors, in this order, fill the data exactly.
absl::Status check_places(std::span<const PlacedEntry> placed,
                          int64_t num_data_bytes) {
  int64_t end = 0;
  for (const PlacedEntry& next : placed) {
    if (next.begin != end) {
      return damaged_tensor(
          next.entry.name,
          absl::StrCat("must begin where the one before ends, at byte ", end,
                       " of the data, but begins at ", next.begin));
    }
    end = next.end;
    if (end > num_data_bytes) {
      return damaged_tensor(
          next.entry.name,
          absl::StrCat("must end at byte ", end,
                       " of the data, but the file ends at ", num_data_bytes));
    }
  }
  if (end < num_data_bytes) {
    return absl::DataLossError(absl::StrCat(
        "the data must end at byte ", end,
        ", behind the last tensor, but the file ends at ", num_data_bytes));
  }
  return absl::OkStatus();
}

// Fills in the metadata and the checksums, and compares that of the header.
absl::Status parse_metadata(const json& header, SafetensorsHeader* parsed) {
  parsed->checksums.resize(parsed->entries.size());
  const auto metadata = header.find(kMetadata);
  if (metadata == header.end()) return absl::OkStatus();
  if (!metadata->is_object()) {
    return damaged_header("must have texts by keys as __metadata__");
  }
  std::map<std::string, uint32_t> checksums;
  for (const auto& [key, value] : metadata->items()) {
    if (!value.is_string()) {
      return damaged_header(
          absl::StrCat("must have text in __metadata__ as ", quoted_name(key)));
    }
    const std::string text = value.get<std::string>();
    if (!absl::StartsWith(key, kChecksum)) {
      parsed->metadata.emplace(key, text);
      continue;
    }
    const std::optional<uint32_t> checksum = from_hex(text);
    if (!checksum) {
      return damaged_header(
          absl::StrCat("must have 8 digits in __metadata__ as ",
                       quoted_name(key), ", got ", quoted_name(text)));
    }
    checksums.emplace(key, *checksum);
  }
  if (checksums.empty()) return absl::OkStatus();

  const auto expected = checksums.find(kChecksum);
  if (expected == checksums.end()) {
    return damaged_header(
        absl::StrCat("has checksums of tensors in "
                     "__metadata__, but not its own, ",
                     kChecksum));
  }
  if (const uint32_t found = checksum_of(header); found != expected->second) {
    return damaged_header(absl::StrCat("must have the CRC-32 ",
                                       to_hex(expected->second), ", but has ",
                                       to_hex(found)));
  }
  for (size_t e = 0; e < parsed->entries.size(); ++e) {
    const auto found = checksums.find(checksum_key(parsed->entries[e].name));
    if (found != checksums.end()) parsed->checksums[e] = found->second;
  }
  return absl::OkStatus();
}

}  // namespace

std::string dtype_name(SafetensorsDtype dtype) {
  return std::string(kDtypes[static_cast<size_t>(dtype)].name);
}

int64_t dtype_bytes(SafetensorsDtype dtype) {
  return kDtypes[static_cast<size_t>(dtype)].bytes;
}

int64_t SafetensorsEntry::num_bytes() const {
  const int64_t numel = std::accumulate(shape.begin(), shape.end(), int64_t{1},
                                        std::multiplies<>());
  return numel * dtype_bytes(dtype);
}

std::string quoted_name(std::string_view name) {
  constexpr size_t kMostShown = 200;
  std::string shown(name.substr(0, kMostShown));
  if (shown.size() < name.size()) {
    // Not within a character.
    for (size_t end = kMostShown; (name[end] & 0xc0) == 0x80 && end > 0;) {
      shown.resize(--end);
    }
  }
  return absl::StrCat(
      "'", is_utf8(shown) ? absl::Utf8SafeCEscape(shown) : absl::CEscape(shown),
      "'", shown.size() < name.size() ? "…" : "");
}

std::vector<int64_t> data_begins(std::span<const SafetensorsEntry> entries) {
  std::vector<int64_t> begins = {0};
  for (const SafetensorsEntry& entry : entries) {
    begins.push_back(begins.back() + entry.num_bytes());
  }
  return begins;
}

uint32_t extend_checksum(uint32_t checksum, std::span<const std::byte> bytes) {
  return static_cast<uint32_t>(crc32_z(
      checksum, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size()));
}

absl::StatusOr<std::string> format_header(
    std::span<const SafetensorsEntry> entries,
    const SafetensorsMetadata& metadata, std::span<const uint32_t> checksums) {
  if (absl::Status status = validate(entries, metadata); !status.ok()) {
    return status;
  }
  json with_checksums = metadata;
  for (size_t e = 0; e < entries.size(); ++e) {
    with_checksums[checksum_key(entries[e].name)] = to_hex(checksums[e]);
  }
  std::string text = text_of_header(entries, with_checksums, 0);
  if (text.size() > kMostHeaderBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the header must have at most ", kMostHeaderBytes, " bytes, but ",
        entries.size(), " tensors and the metadata need ", text.size(),
        "; use several files, or less metadata"));
  }
  return text_of_header(entries, with_checksums,
                        checksum_of(json::parse(text)));
}

absl::StatusOr<SafetensorsHeader> parse_header(std::string_view text,
                                               int64_t num_data_bytes) {
  const absl::StatusOr<ParsedJson> parsed = parse_json(text);
  if (!parsed.ok()) return parsed.status();

  std::vector<PlacedEntry> placed;
  for (const auto& [name, fields] : parsed->header.items()) {
    if (name == kMetadata) continue;
    absl::StatusOr<PlacedEntry> entry =
        parse_entry(name, fields, parsed->positions.at(name));
    if (!entry.ok()) return entry.status();
    placed.push_back(*std::move(entry));
  }
  std::ranges::sort(placed, {}, [](const PlacedEntry& p) {
    return std::tuple(p.begin, p.end, p.position);
  });
  if (absl::Status status = check_places(placed, num_data_bytes);
      !status.ok()) {
    return status;
  }
  SafetensorsHeader header;
  for (PlacedEntry& next : placed) {
    header.entries.push_back(std::move(next.entry));
  }
  if (absl::Status status = parse_metadata(parsed->header, &header);
      !status.ok()) {
    return status;
  }
  return header;
}

}  // namespace brigade
