// The JSON header of a safetensors file: what it says of the tensors, as text
// and back. Text that is damaged, lies or contradicts itself is an error.
//
// Source: https://github.com/huggingface/safetensors. Differs: dtypes whose
// elements are no whole bytes (F4, F6_*) are errors; so are a name that occurs
// twice and space before the header's brace, which its reader lets pass.
//
// Knows no files; safetensors_file.h does.
//
// Note [Checksums]
// The metadata gets "brigade.crc32.<name>", the CRC-32 of that tensor's data,
// and "brigade.crc32", that of the header. One for each tensor: the error names
// the tensor, a reader of one tensor need not read the others, and tools that
// reorder tensors and keep the metadata keep it true. That of the header: a
// flipped bit in a name, a shape or the metadata is found too. It is of what
// the header says, not of how that is written; in Python
//
//   del header["__metadata__"]["brigade.crc32"]
//   for name in header.keys() - {"__metadata__"}:
//       del header[name]["data_offsets"]
//   zlib.crc32(json.dumps(header, sort_keys=True, ensure_ascii=False,
//                         separators=(",", ":")).encode())
//
// All are 8 hexadecimal digits, so the header is as long before the data is
// known as behind it. CRC-32 finds accidents, not attacks.

#ifndef BRIGADE_FSDP_CHECKPOINT_SAFETENSORS_HEADER_H_
#define BRIGADE_FSDP_CHECKPOINT_SAFETENSORS_HEADER_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace brigade {

// The format's dtypes, in the order in which it lists them.
enum class SafetensorsDtype : uint8_t {
  kBool,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,
  kF8E8M0,
  kF8E4M3Fnuz,
  kF8E5M2Fnuz,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kC64,  // a pair of F32
  kF64,
  kI64,
  kU64,
};

std::string dtype_name(SafetensorsDtype dtype);  // "BF16"
int64_t dtype_bytes(SafetensorsDtype dtype);     // of one element

// What a header says of one tensor.
struct SafetensorsEntry {
  std::string name;
  SafetensorsDtype dtype = SafetensorsDtype::kF32;
  std::vector<int64_t> shape = {};  // {}: a scalar

  // REQUIRES: a function below, a writer or a reader has accepted the entry.
  int64_t num_bytes() const;

  friend bool operator==(const SafetensorsEntry&,
                         const SafetensorsEntry&) = default;
};

using SafetensorsMetadata = std::map<std::string, std::string>;

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;           // in the order of their data
  std::vector<std::optional<uint32_t>> checksums;  // of the data, by entry
  SafetensorsMetadata metadata;                    // without the checksums
};

// The format's limit.
constexpr int64_t kMostHeaderBytes = 100'000'000;

// A name as errors show it: in quotes, without control characters, and short.
std::string quoted_name(std::string_view name);

// Where each entry's data begins in the data, and where the last ends.
std::vector<int64_t> data_begins(std::span<const SafetensorsEntry> entries);

// CRC-32 of bytes behind those of which `checksum` is; 0 of none.
uint32_t extend_checksum(uint32_t checksum, std::span<const std::byte> bytes);

// The header, padded to a multiple of 8 bytes. Its length does not depend on
// `checksums`, one for each entry.
//
// Errors:
//   InvalidArgument  a name occurs twice or is "__metadata__", a metadata key
//                    begins with "brigade.crc32", text is not UTF-8, a
//                    dimension is < 0, the data exceeds 2^62 bytes or the
//                    header kMostHeaderBytes.
absl::StatusOr<std::string> format_header(
    std::span<const SafetensorsEntry> entries,
    const SafetensorsMetadata& metadata, std::span<const uint32_t> checksums);

// Of a file with `num_data_bytes` behind the header.
//
// Errors:
//   DataLoss  the text is no header, its checksum is another's, or its tensors
//             do not fill the data exactly.
absl::StatusOr<SafetensorsHeader> parse_header(std::string_view text,
                                               int64_t num_data_bytes);

}  // namespace brigade

#endif  // BRIGADE_FSDP_CHECKPOINT_SAFETENSORS_HEADER_H_
