#include "brigade/fsdp/checkpoint/safetensors_file.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;
using Dtype = SafetensorsDtype;

// By hand: safetensors_header.h says how to get the checksums with Python.
constexpr char kGoldenHeader[] =
    R"({"__metadata__":{"brigade.crc32":"c52f69b8",)"
    R"("brigade.crc32.none":"00000000","brigade.crc32.step":"d533eedc",)"
    R"("brigade.crc32.weight":"8ba71454","brigade.crc32.é":"352441c2",)"
    R"("note":"a\nb"},)"
    R"("weight":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},)"
    R"("none":{"dtype":"BF16","shape":[0,5],"data_offsets":[16,16]},)"
    R"("step":{"dtype":"I64","shape":[],"data_offsets":[16,24]},)"
    R"("é":{"dtype":"U8","shape":[3],"data_offsets":[24,27]}}   )";
const std::vector<SafetensorsEntry> kGoldenEntries = {
    {.name = "weight", .dtype = Dtype::kF32, .shape = {2, 2}},
    {.name = "none", .dtype = Dtype::kBF16, .shape = {0, 5}},
    {.name = "step", .dtype = Dtype::kI64, .shape = {}},
    {.name = "é", .dtype = Dtype::kU8, .shape = {3}}};
const SafetensorsMetadata kGoldenMetadata = {{"note", "a\nb"}};
// 1 to 4 as floats; 17; "abc".
const std::vector<std::string> kGoldenData = {
    std::string("\0\0\x80\x3f\0\0\0\x40\0\0\x40\x40\0\0\x80\x40", 16), "",
    std::string("\x11\0\0\0\0\0\0\0", 8), "abc"};

std::string golden_file() {
  std::string file("\xa8\x01\0\0\0\0\0\0", 8);  // 424
  file += kGoldenHeader;
  for (const std::string& data : kGoldenData) file += data;
  return file;
}

// A file by others, whose header need not be true.
std::string file_of(const std::string& header, const std::string& data) {
  std::string file;
  for (int shift = 0; shift < 64; shift += 8) {
    file += static_cast<char>(header.size() >> shift & 0xff);
  }
  return file + header + data;
}

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

std::string message_of(const absl::Status& status) {
  return std::string(status.message());
}

// A folder of its own, and a file in it.
class SafetensorsFileTest : public ::testing::Test {
 protected:
  SafetensorsFileTest() {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }
  ~SafetensorsFileTest() override { std::filesystem::remove_all(folder_); }

  // Removes first: file systems take their time to overwrite safely.
  void put(const std::string& bytes) const {
    std::filesystem::remove(path_);
    std::ofstream(path_, std::ios::binary) << bytes;
  }

  std::string get() const {
    std::ifstream file(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  std::vector<std::string> names_in_folder() const {
    std::vector<std::string> names;
    for (const auto& file : std::filesystem::directory_iterator(folder_)) {
      names.push_back(file.path().filename());
    }
    return names;
  }

  SafetensorsWriter writer_of(std::vector<SafetensorsEntry> entries,
                              SafetensorsMetadata metadata = {}) const {
    return SafetensorsWriter::create(path_, std::move(entries),
                                     std::move(metadata))
        .value();
  }

  // Pieces of at most `most_bytes`.
  void write_all(SafetensorsWriter* writer,
                 const std::vector<std::string>& data,
                 size_t most_bytes = 1 << 20) const {
    for (size_t e = 0; e < data.size(); ++e) {
      for (size_t begin = 0; begin < data[e].size(); begin += most_bytes) {
        const std::string piece = data[e].substr(begin, most_bytes);
        const absl::Status status =
            writer->write(e, static_cast<int64_t>(begin), bytes_of(piece));
        ASSERT_TRUE(status.ok()) << status;
      }
    }
  }

  SafetensorsReader reader() const {
    return SafetensorsReader::open(path_).value();
  }

  absl::Status open_error() const {
    return SafetensorsReader::open(path_).status();
  }

  // Of the whole tensor.
  static std::string data_of(const SafetensorsReader& reader,
                             const std::string& name) {
    const SafetensorsEntry* const entry = reader.find(name);
    if (entry == nullptr) {
      ADD_FAILURE() << "there is no tensor " << quoted_name(name);
      return "";
    }
    std::string data(entry->num_bytes(), '?');
    const absl::Status status =
        reader.read(name, 0, std::as_writable_bytes(std::span(data)));
    EXPECT_TRUE(status.ok()) << status;
    return data;
  }

  static void expect_holds(const SafetensorsReader& reader,
                           const std::vector<SafetensorsEntry>& entries,
                           const std::vector<std::string>& data,
                           const SafetensorsMetadata& metadata) {
    EXPECT_EQ(reader.entries(), entries);
    EXPECT_EQ(reader.metadata(), metadata);
    for (size_t e = 0; e < entries.size(); ++e) {
      EXPECT_EQ(data_of(reader, entries[e].name), data[e]);
    }
  }

  void expect_round_trip(const std::vector<SafetensorsEntry>& entries,
                         const std::vector<std::string>& data,
                         const SafetensorsMetadata& metadata) const {
    SafetensorsWriter writer = writer_of(entries, metadata);
    write_all(&writer, data);
    const absl::Status finished = writer.finish();
    ASSERT_TRUE(finished.ok()) << finished;
    const SafetensorsReader read = reader();
    expect_holds(read, entries, data, metadata);
    const absl::Status verified = read.verify();
    EXPECT_TRUE(verified.ok()) << verified;
  }

  const std::string folder_ = absl::StrCat(
      ::testing::TempDir(), "/safetensors_file_test.", ::getpid(), ".",
      ::testing::UnitTest::GetInstance()->current_test_info()->name());
  const std::string path_ = folder_ + "/file.safetensors";
};

TEST_F(SafetensorsFileTest, WritesTheGoldenFile) {
  SafetensorsWriter writer = writer_of(kGoldenEntries, kGoldenMetadata);
  write_all(&writer, kGoldenData);
  ASSERT_TRUE(writer.finish().ok());
  EXPECT_EQ(get(), golden_file());
}

TEST_F(SafetensorsFileTest, ReadsTheGoldenFile) {
  put(golden_file());
  const SafetensorsReader read = reader();
  expect_holds(read, kGoldenEntries, kGoldenData, kGoldenMetadata);
  EXPECT_TRUE(read.verify().ok());
}

TEST_F(SafetensorsFileTest, ReadsFilesByOthers) {
  // In another order, with fields and spaces that are not ours.
  put(file_of(R"({"b": {"shape": [2], "data_offsets": [4, 6], "x": 1.5e3,
                        "dtype": "U8"},
                  "a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}
                 })"
              "\n",
              "datahi"));
  const SafetensorsReader read = reader();
  expect_holds(read,
               {{.name = "a", .dtype = Dtype::kF32, .shape = {}},
                {.name = "b", .dtype = Dtype::kU8, .shape = {2}}},
               {"data", "hi"}, {});
  EXPECT_TRUE(read.verify().ok()) << "there are no checksums";
  EXPECT_TRUE(read.verify("b").ok());
}

TEST_F(SafetensorsFileTest, ChecksumsSurviveToolsThatReorderTheTensors) {
  std::string header = kGoldenHeader;
  const std::string weight =
      R"("weight":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},)";
  header.erase(header.find(weight), weight.size());
  header.replace(header.find("[16,16]"), 7, "[0,0]");
  header.replace(header.find("[16,24]"), 7, "[0,8]");
  header.replace(header.find("[24,27]}}"), 9,
                 R"([8,11]},"weight":{"data_offsets":[11,27],)"
                 R"("shape":[2,2],"dtype":"F32"}})");
  put(file_of(header, kGoldenData[2] + kGoldenData[3] + kGoldenData[0]));
  const absl::Status verified = reader().verify();
  EXPECT_TRUE(verified.ok()) << verified;
  EXPECT_EQ(data_of(reader(), "weight"), kGoldenData[0]);

  put(file_of(header, kGoldenData[3] + kGoldenData[2] + kGoldenData[0]));
  EXPECT_THAT(message_of(reader().verify()), HasSubstr("tensor 'step'"));
}

TEST_F(SafetensorsFileTest, NoTensorsMakeAFile) {
  expect_round_trip({}, {}, {});
  expect_round_trip({}, {}, {{"step", "17"}});
  put(file_of("{}", ""));
  expect_holds(reader(), {}, {}, {});
}

TEST_F(SafetensorsFileTest, TensorsWithoutElementsKeepTheirOrder) {
  expect_round_trip({{.name = "z", .shape = {0}},
                     {.name = "m", .shape = {3, 0, 2}},
                     {.name = "a", .dtype = Dtype::kU8, .shape = {1}},
                     {.name = "y", .shape = {0}},
                     {.name = "b", .shape = {0}}},
                    {"", "", "x", "", ""}, {});
}

TEST_F(SafetensorsFileTest, TensorsWithoutElementsMayComeAnywhereInTheHeader) {
  put(file_of(R"({"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
              R"("c":{"dtype":"U8","shape":[0],"data_offsets":[1,1]},)"
              R"("a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})",
              "x"));
  expect_holds(reader(),
               {{.name = "a", .dtype = Dtype::kU8, .shape = {0}},
                {.name = "b", .dtype = Dtype::kU8, .shape = {1}},
                {.name = "c", .dtype = Dtype::kU8, .shape = {0}}},
               {"", "x", ""}, {});
}

TEST_F(SafetensorsFileTest, LongDimensionsBesideA0AreNoOverflow) {
  const int64_t most = std::numeric_limits<int64_t>::max();
  expect_round_trip(
      {{.name = "a", .dtype = Dtype::kF64, .shape = {most, 0}},
       {.name = "b", .dtype = Dtype::kF64, .shape = {0, most, most}}},
      {"", ""}, {});
}

TEST_F(SafetensorsFileTest, NamesAndMetadataAreAnyText) {
  using namespace std::string_literals;
  const std::vector<std::string> texts = {
      "",      "größe",     "层.0",         "🎲",        "a b/c\\d",
      "\"q\"", "new\nline", "nul\0nul"s,    "\x7f\x1b", "__metadata",
      "...",   "{}",        "brigade.crc32"};
  std::vector<SafetensorsEntry> entries;
  std::vector<std::string> data;
  SafetensorsMetadata metadata;
  for (const std::string& text : texts) {
    entries.push_back({.name = text, .dtype = Dtype::kI8, .shape = {2, 1}});
    data.push_back({static_cast<char>(data.size()), 'x'});
    metadata["key " + text] = text;
  }
  expect_round_trip(entries, data, metadata);
}

TEST_F(SafetensorsFileTest, EveryDtypeHasTheFormatsNameAndLength) {
  const std::vector<std::pair<std::string, int64_t>> expected = {
      {"BOOL", 1},    {"U8", 1},      {"I8", 1},          {"F8_E5M2", 1},
      {"F8_E4M3", 1}, {"F8_E8M0", 1}, {"F8_E4M3FNUZ", 1}, {"F8_E5M2FNUZ", 1},
      {"I16", 2},     {"U16", 2},     {"F16", 2},         {"BF16", 2},
      {"I32", 4},     {"U32", 4},     {"F32", 4},         {"C64", 8},
      {"F64", 8},     {"I64", 8},     {"U64", 8}};
  std::vector<SafetensorsEntry> entries;
  std::vector<std::string> data;
  for (size_t d = 0; d < expected.size(); ++d) {
    EXPECT_EQ(dtype_name(Dtype(d)), expected[d].first);
    EXPECT_EQ(dtype_bytes(Dtype(d)), expected[d].second);
    entries.push_back(
        {.name = expected[d].first, .dtype = Dtype(d), .shape = {3}});
    data.emplace_back(3 * expected[d].second, static_cast<char>('a' + d));
  }
  EXPECT_EQ(static_cast<size_t>(Dtype::kU64) + 1, expected.size());
  expect_round_trip(entries, data, {});
}

TEST_F(SafetensorsFileTest, DataBeginsAtAMultipleOf8) {
  for (size_t length = 0; length < 9; ++length) {
    SafetensorsWriter writer = writer_of({}, {{std::string(length, 'k'), ""}});
    ASSERT_TRUE(writer.finish().ok());
    EXPECT_EQ(std::filesystem::file_size(path_) % 8, 0);
  }
}

TEST_F(SafetensorsFileTest, PiecesOfAnyLengthMakeTheSameFile) {
  for (const size_t most_bytes : {1, 3, 7, 16}) {
    SafetensorsWriter writer = writer_of(kGoldenEntries, kGoldenMetadata);
    write_all(&writer, kGoldenData, most_bytes);
    ASSERT_TRUE(writer.finish().ok());
    EXPECT_EQ(get(), golden_file());
  }
}

TEST_F(SafetensorsFileTest, ATensorLongerThanTheBufferOfVerify) {
  std::string data((1 << 20) * 2 + 5, 'x');
  const std::vector<SafetensorsEntry> entries = {
      {.name = "long",
       .dtype = Dtype::kU8,
       .shape = {static_cast<int64_t>(data.size())}}};
  std::mt19937 random(7);
  for (char& byte : data) byte = static_cast<char>(random());
  expect_round_trip(entries, {data}, {});

  std::string file = get();
  file.back() ^= 1;
  put(file);
  EXPECT_FALSE(reader().verify().ok());
}

TEST_F(SafetensorsFileTest, ReadsAnyPartOfATensor) {
  put(golden_file());
  const SafetensorsReader read = reader();
  for (size_t begin = 0; begin <= 16; ++begin) {
    for (size_t length = 0; begin + length <= 16; ++length) {
      std::string part(length, '?');
      ASSERT_TRUE(read.read("weight", static_cast<int64_t>(begin),
                            std::as_writable_bytes(std::span(part)))
                      .ok());
      EXPECT_EQ(part, kGoldenData[0].substr(begin, length));
    }
  }
}

TEST_F(SafetensorsFileTest, ReadsAWholeTensorAndChecksIt) {
  put(golden_file());
  std::string data(16, '?');
  const auto read_whole = [&](size_t length) {
    return reader().read_whole(
        "weight", std::as_writable_bytes(std::span(data)).first(length));
  };
  EXPECT_TRUE(read_whole(16).ok());
  EXPECT_EQ(data, kGoldenData[0]);
  EXPECT_EQ(message_of(read_whole(15)),
            path_ + ": tensor 'weight' has 16 bytes, got room for 15");
  std::string file = golden_file();
  file[file.rfind(kGoldenData[0]) + 3] ^= 1;
  put(file);
  EXPECT_THAT(message_of(read_whole(16)),
              HasSubstr("tensor 'weight' must have the CRC-32"));
}

TEST_F(SafetensorsFileTest, RefusesToReadOtherBytesThanTheTensors) {
  put(golden_file());
  const SafetensorsReader read = reader();
  std::vector<std::byte> two(2);
  for (const int64_t offset : {int64_t{15}, int64_t{17}, int64_t{-1},
                               std::numeric_limits<int64_t>::max(),
                               std::numeric_limits<int64_t>::min()}) {
    const absl::Status status = read.read("weight", offset, two);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(message_of(status),
              absl::StrCat(path_,
                           ": tensor 'weight' has 16 bytes, got a range of 2 "
                           "from byte ",
                           offset));
  }
  EXPECT_FALSE(read.read("none", 0, two).ok());
}

TEST_F(SafetensorsFileTest, AnUnknownNameIsAnErrorThatListsSome) {
  put(golden_file());
  const SafetensorsReader read = reader();
  EXPECT_EQ(read.find("bias"), nullptr);
  EXPECT_EQ(read.find("step")->dtype, Dtype::kI64);
  const absl::Status status = read.read("bias", 0, {});
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(message_of(status),
            path_ +
                ": has no tensor 'bias', but 4: 'weight', 'none', 'step', "
                "'é'");
  EXPECT_EQ(read.verify("bias"), status);
}

TEST_F(SafetensorsFileTest, AFileCutAtAnyByteIsAnErrorThatNamesIt) {
  const std::string file = golden_file();
  for (size_t length = 0; length < file.size(); ++length) {
    put(file.substr(0, length));
    const absl::Status status = open_error();
    ASSERT_EQ(status.code(), absl::StatusCode::kDataLoss) << length;
    ASSERT_THAT(message_of(status), StartsWith(path_ + ": "));
    // Behind the header it is known whose bytes are missing.
    const size_t in_data = length - (8 + 424);
    if (length >= 8 + 424) {
      ASSERT_THAT(message_of(status), HasSubstr(in_data < 16   ? "'weight'"
                                                : in_data < 24 ? "'step'"
                                                               : "'é'"));
    }
  }
  put(file + '\0');
  EXPECT_THAT(message_of(open_error()),
              HasSubstr("the data must end at byte 27, behind the last tensor, "
                        "but the file ends at 28"));
}

TEST_F(SafetensorsFileTest, AFlippedBitAnywhereIsAnErrorOrChangesNothing) {
  int num_harmless = 0;
  for (size_t bit = 0; bit < golden_file().size() * 8; ++bit) {
    std::string file = golden_file();
    file[bit / 8] = static_cast<char>(file[bit / 8] ^ 1 << bit % 8);
    put(file);
    SCOPED_TRACE(bit);
    const absl::StatusOr<SafetensorsReader> read =
        SafetensorsReader::open(path_);
    if (!read.ok()) {
      ASSERT_EQ(read.status().code(), absl::StatusCode::kDataLoss);
      ASSERT_THAT(message_of(read.status()), StartsWith(path_ + ": "));
      continue;
    }
    if (const absl::Status status = read->verify(); !status.ok()) {
      ASSERT_EQ(status.code(), absl::StatusCode::kDataLoss);
      continue;
    }
    ++num_harmless;
    expect_holds(*read, kGoldenEntries, kGoldenData, kGoldenMetadata);
  }
  // A digit of the header's checksum as a capital letter: c, f and b.
  EXPECT_EQ(num_harmless, 3);
}

TEST_F(SafetensorsFileTest, AFlippedBitOfDataNamesItsTensorAndNoOther) {
  std::string file = golden_file();
  file[file.size() - 4] ^= 0x40;  // the last byte of "step"
  put(file);
  const SafetensorsReader read = reader();
  const absl::Status status = read.verify();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(message_of(status),
              AllOf(StartsWith(path_ + ": tensor 'step' must have the CRC-32 "
                                       "d533eedc, but has "),
                    HasSubstr("use another copy")));
  EXPECT_EQ(read.verify("step"), status);
  EXPECT_TRUE(read.verify("weight").ok());
  EXPECT_TRUE(read.verify("none").ok());
  EXPECT_TRUE(read.verify("é").ok());
}

TEST_F(SafetensorsFileTest, ADamagedHeaderOfOursIsAnError) {
  const auto error_with = [&](const std::string& old_text,
                              const std::string& new_text) {
    std::string file = golden_file();
    const size_t begin = file.find(old_text);
    file.replace(begin, old_text.size(), new_text);
    put(file);
    return message_of(open_error());
  };
  EXPECT_THAT(error_with(R"(a\nb)", R"(a\nc)"),
              HasSubstr("the header must have the CRC-32 c52f69b8, but has "));
  EXPECT_THAT(error_with("[2,2]", "[4,1]"), HasSubstr("c52f69b8"));
  EXPECT_THAT(error_with("I64", "F64"), HasSubstr("c52f69b8"));
  EXPECT_THAT(error_with("weight\":{", "Weight\":{"), HasSubstr("c52f69b8"));
  EXPECT_THAT(error_with("d533eedc", "d533eedd"), HasSubstr("c52f69b8"));
  EXPECT_THAT(error_with("c52f69b8", "c52f69b9"), HasSubstr("c52f69b9"));
  EXPECT_THAT(error_with("brigade.crc32\"", "brigade.crc33\""),
              HasSubstr("but not its own, brigade.crc32"));
  EXPECT_THAT(error_with("c52f69b8", "c52f69bx"),
              HasSubstr("must have 8 digits in __metadata__ as "
                        "'brigade.crc32', got 'c52f69bx'"));
  EXPECT_THAT(error_with("c52f69b8", "-52f69b8"), HasSubstr("8 digits"));
  EXPECT_THAT(error_with("c52f69b8\"", "c52f69b\" "),
              HasSubstr("8 digits in __metadata__ as 'brigade.crc32', got "
                        "'c52f69b'"));
}

TEST_F(SafetensorsFileTest, AHeaderThatLiesIsAnError) {
  const auto error_of = [&](const std::string& header) {
    put(file_of(header, "12345678"));
    const absl::Status status = open_error();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << header;
    EXPECT_THAT(message_of(status), StartsWith(path_ + ": "));
    return message_of(status);
  };
  const auto error_of_entry = [&](const std::string& fields) {
    return error_of(R"({"w":{)" + fields + "}}");
  };
  put(file_of(R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})",
              "12345678"));
  EXPECT_TRUE(open_error().ok()) << "what follows differs from it by its lie";

  // JSON.
  EXPECT_THAT(error_of(""), HasSubstr("must begin with '{'"));
  EXPECT_THAT(error_of(" {}"), HasSubstr("must begin with '{'"));
  EXPECT_THAT(error_of(std::string("{}\0", 3)), HasSubstr("have no NUL"));
  EXPECT_THAT(error_of("{"), HasSubstr("the header is no valid JSON"));
  EXPECT_THAT(error_of("{}}"), HasSubstr("no valid JSON"));
  EXPECT_THAT(error_of("{\"\xff\":1}"), HasSubstr("no valid JSON"));
  EXPECT_THAT(error_of(R"({"w":1e999})"), HasSubstr("no valid JSON"));
  EXPECT_THAT(error_of("{}"), HasSubstr("the data must end at byte 0"));
  EXPECT_THAT(error_of(R"({"w":)" + std::string(100'000, '[')),
              HasSubstr("tensor 'w' has lists in lists"));
  EXPECT_THAT(error_of(R"({"w":1})"),
              HasSubstr("tensor 'w' must have a dtype"));
  EXPECT_THAT(error_of(R"({"w":[]})"), HasSubstr("must have a dtype, a shape"));

  // Names.
  EXPECT_THAT(
      error_of(R"({"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
               R"("w":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})"),
      HasSubstr("tensor 'w' is in the header twice"));
  EXPECT_THAT(error_of_entry(R"("dtype":"F64","dtype":"F32","shape":[2],)"
                             R"("data_offsets":[0,8])"),
              HasSubstr("tensor 'w' has 'dtype' twice"));
  EXPECT_THAT(error_of(R"({"__metadata__":{"a":"1","a":"2"}})"),
              HasSubstr("'__metadata__' has 'a' twice"));

  // Metadata.
  EXPECT_THAT(error_of(R"({"__metadata__":[],"w":{"dtype":"F32","shape":[2],)"
                       R"("data_offsets":[0,8]}})"),
              HasSubstr("must have texts by keys as __metadata__"));
  EXPECT_THAT(
      error_of(R"({"__metadata__":{"step":17},"w":{"dtype":"F32","shape":[2],)"
               R"("data_offsets":[0,8]}})"),
      HasSubstr("must have text in __metadata__ as 'step'"));

  // Dtypes.
  EXPECT_THAT(error_of_entry(R"("shape":[2],"data_offsets":[0,8])"),
              HasSubstr("I64, U64, got ''"));
  EXPECT_THAT(
      error_of_entry(R"("dtype":"F4","shape":[16],"data_offsets":[0,8])"),
      HasSubstr("must have a dtype of BOOL, U8, "));
  EXPECT_THAT(error_of_entry(R"("dtype":1,"shape":[2],"data_offsets":[0,8])"),
              HasSubstr("must have a dtype of"));

  // Shapes.
  for (const std::string shape :
       {"null", "2", "[-2]", "[2.0]", "[\"2\"]", "[9223372036854775808]",
        "[18446744073709551615]", "[18446744073709551616]"}) {
    EXPECT_THAT(error_of_entry(absl::StrCat(
                    R"("dtype":"F32","data_offsets":[0,8],"shape":)", shape)),
                HasSubstr("must have a shape of integers >= 0"));
  }
  EXPECT_THAT(
      error_of_entry(R"("dtype":"F32","shape":[3],"data_offsets":[0,8])"),
      HasSubstr("tensor 'w' is F32 of shape [3], which is 12 bytes, but has "
                "data_offsets [0, 8]"));
  // 2^62 + 2 elements, whose bytes are 8 modulo 2^64; and 2^64 of them.
  EXPECT_THAT(error_of_entry(R"("dtype":"F32","shape":[2305843009213693953,2],)"
                             R"("data_offsets":[0,8])"),
              HasSubstr("which is more than 2^62 bytes"));
  EXPECT_THAT(error_of_entry(R"("dtype":"F32","shape":[4294967296,4294967296],)"
                             R"("data_offsets":[0,0])"),
              HasSubstr("which is more than 2^62 bytes"));

  // Places.
  for (const std::string offsets :
       {"[0]", "[0,4,8]", "[-8,0]", "[8,0]", "8", "[0,8.0]",
        "[0,18446744073709551615]", "[18446744073709551608,0]"}) {
    EXPECT_THAT(error_of_entry(absl::StrCat(
                    R"("dtype":"F32","shape":[2],"data_offsets":)", offsets)),
                HasSubstr("two integers, 0 <= begin <= end"));
  }
  EXPECT_THAT(error_of_entry(R"("dtype":"F32","shape":[1],)"
                             R"("data_offsets":[4,8])"),
              HasSubstr("tensor 'w' must begin where the one before ends, at "
                        "byte 0 of the data, but begins at 4"));
  EXPECT_THAT(error_of_entry(R"("dtype":"F32","shape":[3],)"
                             R"("data_offsets":[0,12])"),
              HasSubstr("tensor 'w' must end at byte 12 of the data, but the "
                        "file ends at 8"));
  EXPECT_THAT(
      error_of(R"({"v":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
               R"("w":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})"),
      HasSubstr("tensor 'w' must begin where the one before ends, at byte 8"));
  EXPECT_THAT(
      error_of(R"({"v":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
               R"("w":{"dtype":"U8","shape":[3],"data_offsets":[5,8]}})"),
      HasSubstr("tensor 'w' must begin where the one before ends, at byte 4"));
  EXPECT_THAT(
      error_of(R"({"v":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
               R"("w":{"dtype":"U8","shape":[0],"data_offsets":[4,4]}})"),
      HasSubstr("tensor 'w' must begin where the one before ends, at byte 8"));
}

TEST_F(SafetensorsFileTest, AHeaderLengthThatLiesIsAnErrorBeforeItIsRead) {
  const auto error_of = [&](const std::string& length, int64_t file_bytes) {
    put(length);
    std::filesystem::resize_file(path_, file_bytes);
    return message_of(open_error());
  };
  using namespace std::string_literals;
  EXPECT_THAT(error_of("\x09\0\0\0\0\0\0\0"s, 16),
              HasSubstr("says that its header has 9 bytes, but it can have at "
                        "most 8"));
  EXPECT_THAT(error_of("\xff\xff\xff\xff\xff\xff\xff\xff"s, 16),
              HasSubstr("18446744073709551615 bytes, but it can have at most "
                        "8"));
  // 100,000,001, in a file that has as many, and takes no room on the disk.
  EXPECT_THAT(error_of("\x01\xe1\xf5\x05\0\0\0\0"s, 200'000'000),
              HasSubstr("at most 100000000"));
  EXPECT_THAT(error_of("", 7),
              HasSubstr("must begin with 8 bytes of header length, but has 7"));
}

TEST_F(SafetensorsFileTest, RandomDamageNeverCrashesAndNeverChangesTensors) {
  std::mt19937 random(97);
  const auto up_to = [&](size_t most) {
    return std::uniform_int_distribution<size_t>(0, most)(random);
  };
  const std::string ours = golden_file();
  const std::string by_others =
      file_of(R"({"a":{"dtype":"F32","shape":[2,50],"data_offsets":[0,400]},)"
              R"("b":{"dtype":"I8","shape":[0],"data_offsets":[400,400]}})",
              std::string(400, 'x'));
  int num_open = 0;
  for (int round = 0; round < 6000; ++round) {
    const bool with_checksums = round % 2;
    std::string file = with_checksums ? ours : by_others;
    for (size_t flips = up_to(2) + 1; flips > 0; --flips) {
      const size_t at = up_to(file.size() - 1);
      switch (up_to(4)) {
        case 0:
          file.insert(at, 1, file[up_to(file.size() - 1)]);
          break;
        case 1:
          file.erase(at, 1);
          break;
        case 2:  // what means something in JSON
          file[at] = "{}[],:\"0129-.e\\ "[up_to(15)];
          break;
        default:
          file[at] = static_cast<char>(file[at] ^ 1 << up_to(7));
      }
    }
    put(file);
    SCOPED_TRACE(round);
    const absl::StatusOr<SafetensorsReader> read =
        SafetensorsReader::open(path_);
    if (!read.ok()) continue;
    ++num_open;
    int64_t num_bytes = 0;
    for (const SafetensorsEntry& entry : read->entries()) {
      ASSERT_LE(entry.num_bytes(), static_cast<int64_t>(file.size()));
      num_bytes += static_cast<int64_t>(data_of(*read, entry.name).size());
    }
    ASSERT_LE(num_bytes, static_cast<int64_t>(file.size()));
    if (read->verify().ok() && with_checksums) {
      expect_holds(*read, kGoldenEntries, kGoldenData, kGoldenMetadata);
    }
  }
  EXPECT_GT(num_open, 300) << "else little behind open() has been tried";
}

TEST_F(SafetensorsFileTest, AFileThatShrinksBehindOpenIsAnError) {
  put(golden_file());
  const SafetensorsReader read = reader();
  std::filesystem::resize_file(path_, golden_file().size() - 5);
  const absl::Status status = read.verify();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(
      message_of(status),
      StartsWith(path_ +
                 ": tensor 'step' has lost its last 2 bytes since open()"));
  EXPECT_TRUE(read.verify("weight").ok());
}

TEST_F(SafetensorsFileTest, AnOpenReaderKeepsItsFileWhenItIsReplaced) {
  put(golden_file());
  const SafetensorsReader read = reader();
  ASSERT_TRUE(writer_of({}).finish().ok());
  EXPECT_TRUE(reader().entries().empty());
  expect_holds(read, kGoldenEntries, kGoldenData, kGoldenMetadata);
}

TEST_F(SafetensorsFileTest, WhatCannotBeOpenedIsAnError) {
  const absl::Status missing = open_error();
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(message_of(missing),
            path_ +
                ": cannot read it: No such file or directory\nCheck that "
                "the file exists and may be read.");
  const absl::Status folder = SafetensorsReader::open(folder_).status();
  EXPECT_THAT(message_of(folder), StartsWith(folder_ + ": is no file"));
}

TEST_F(SafetensorsFileTest, AWriterDroppedUnfinishedLeavesTheFileBefore) {
  put("the file before");
  for (size_t num_entries = 0; num_entries <= kGoldenData.size();
       ++num_entries) {
    {
      SafetensorsWriter writer = writer_of(kGoldenEntries, kGoldenMetadata);
      write_all(&writer, {kGoldenData.begin(),
                          kGoldenData.begin() + static_cast<int>(num_entries)});
      EXPECT_EQ(names_in_folder().size(), 2);
      EXPECT_EQ(get(), "the file before");
    }
    EXPECT_THAT(names_in_folder(), ElementsAre("file.safetensors"));
    EXPECT_EQ(get(), "the file before");
  }
}

TEST_F(SafetensorsFileTest, AFinishedFileReplacesTheOneBeforeAndLeavesNoOther) {
  put("the file before");
  SafetensorsWriter writer = writer_of(kGoldenEntries, kGoldenMetadata);
  write_all(&writer, kGoldenData);
  ASSERT_TRUE(writer.finish().ok());
  EXPECT_EQ(get(), golden_file());
  EXPECT_THAT(names_in_folder(), ElementsAre("file.safetensors"));
}

TEST_F(SafetensorsFileTest, AMovedWriterGoesOn) {
  SafetensorsWriter first = writer_of(kGoldenEntries, kGoldenMetadata);
  write_all(&first, {kGoldenData[0]});
  SafetensorsWriter second = std::move(first);
  ASSERT_TRUE(second.write(2, 0, bytes_of(kGoldenData[2])).ok());
  first = writer_of({});
  first = std::move(second);
  EXPECT_EQ(names_in_folder().size(), 1) << "the assigned-to is dropped";
  ASSERT_TRUE(first.write(3, 0, bytes_of(kGoldenData[3])).ok());
  ASSERT_TRUE(first.finish().ok());
  EXPECT_EQ(get(), golden_file());
}

TEST_F(SafetensorsFileTest, TwoWritersOfAPathDoNotDisturbEachOther) {
  SafetensorsWriter first = writer_of(kGoldenEntries, kGoldenMetadata);
  SafetensorsWriter second = writer_of({{.name = "other", .shape = {1}}});
  write_all(&first, {kGoldenData[0], "", kGoldenData[2]});
  write_all(&second, {"data"});
  ASSERT_TRUE(second.finish().ok());
  EXPECT_EQ(data_of(reader(), "other"), "data");
  ASSERT_TRUE(first.write(3, 0, bytes_of(kGoldenData[3])).ok());
  ASSERT_TRUE(first.finish().ok());
  EXPECT_EQ(get(), golden_file());
  EXPECT_THAT(names_in_folder(), ElementsAre("file.safetensors"));
}

TEST_F(SafetensorsFileTest, WritesComeInOrderAndWithinTheirTensor) {
  SafetensorsWriter writer = writer_of(kGoldenEntries, kGoldenMetadata);
  const auto error_of = [&](size_t entry, int64_t offset, size_t num_bytes) {
    const std::string bytes(num_bytes, 'x');
    return writer.write(entry, offset, bytes_of(bytes));
  };
  EXPECT_EQ(message_of(error_of(4, 0, 1)),
            path_ + ": has 4 tensors, got one of index 4");
  EXPECT_EQ(message_of(error_of(0, 8, 9)),
            path_ +
                ": tensor 'weight' has 16 bytes, got a range of 9 from "
                "byte 8");
  EXPECT_EQ(error_of(0, -1, 1).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(error_of(1, 0, 1).code(), absl::StatusCode::kInvalidArgument);

  ASSERT_TRUE(writer.write(0, 0, bytes_of(kGoldenData[0].substr(0, 4))).ok());
  for (const auto& [entry, offset] :
       {std::pair<size_t, int64_t>(0, 0), {0, 5}, {2, 0}}) {
    const absl::Status status = error_of(entry, offset, 1);
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(message_of(status),
                HasSubstr(absl::StrCat("the next byte to write is byte 4 of "
                                       "tensor 'weight', got byte ",
                                       offset, " of tensor ")));
  }
  // None of it has left a trace.
  ASSERT_TRUE(writer.write(0, 4, bytes_of(kGoldenData[0].substr(4))).ok());
  EXPECT_TRUE(error_of(0, 16, 0).ok());
  EXPECT_TRUE(error_of(1, 0, 0).ok());
  ASSERT_TRUE(writer.write(2, 0, bytes_of(kGoldenData[2])).ok());
  ASSERT_TRUE(writer.write(3, 0, bytes_of(kGoldenData[3])).ok());
  EXPECT_THAT(message_of(error_of(2, 0, 1)),
              HasSubstr("the next byte to write is none, got byte 0"));
  ASSERT_TRUE(writer.finish().ok());
  EXPECT_EQ(get(), golden_file());
}

TEST_F(SafetensorsFileTest, FinishWantsAllOfItAndOnlyOnce) {
  SafetensorsWriter writer = writer_of(kGoldenEntries, kGoldenMetadata);
  write_all(&writer, {kGoldenData[0], "", kGoldenData[2].substr(0, 3)});
  const absl::Status early = writer.finish();
  EXPECT_EQ(early.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(message_of(early),
            path_ +
                ": is not complete: the next byte to write is byte 3 of "
                "tensor 'step'\nWrite it before finish().");
  EXPECT_FALSE(std::filesystem::exists(path_));

  ASSERT_TRUE(writer.write(2, 3, bytes_of(kGoldenData[2].substr(3))).ok());
  ASSERT_TRUE(writer.write(3, 0, bytes_of(kGoldenData[3])).ok());
  ASSERT_TRUE(writer.finish().ok());
  for (const absl::Status& status : {writer.finish(), writer.write(0, 0, {})}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(message_of(status), HasSubstr("finish() was called"));
  }
  EXPECT_EQ(get(), golden_file());
}

TEST_F(SafetensorsFileTest, RefusesEntriesThatMakeNoFile) {
  const auto error_of = [&](std::vector<SafetensorsEntry> entries,
                            SafetensorsMetadata metadata = {}) {
    const absl::Status status =
        SafetensorsWriter::create(path_, std::move(entries),
                                  std::move(metadata))
            .status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(message_of(status), StartsWith(path_ + ": "));
    return message_of(status);
  };
  EXPECT_THAT(error_of({{.name = "w"}, {.name = "v"}, {.name = "w"}}),
              HasSubstr("two tensors have the name 'w'"));
  EXPECT_THAT(error_of({{.name = "__metadata__"}}),
              HasSubstr("cannot have the name '__metadata__'"));
  EXPECT_THAT(error_of({{.name = "w\xff"}}),
              HasSubstr(R"(the name of tensor 'w\377' must be UTF-8)"));
  EXPECT_THAT(error_of({{.name = "w", .shape = {2, -3}}}),
              HasSubstr("tensor 'w' must have dimensions >= 0, got F32 of "
                        "shape [2, -3]"));
  const int64_t most = int64_t{1} << 62;
  EXPECT_THAT(error_of({{.name = "w", .shape = {most}}}),
              HasSubstr("tensor 'w', F32 of shape [4611686018427387904], "
                        "brings the data to more than 2^62 bytes"));
  EXPECT_THAT(error_of({{.name = "v", .dtype = Dtype::kU8, .shape = {most}},
                        {.name = "w", .dtype = Dtype::kU8, .shape = {1}}}),
              HasSubstr("tensor 'w', U8 of shape [1], brings"));
  EXPECT_THAT(error_of({}, {{"brigade.crc32.w", "0"}}),
              HasSubstr("'brigade.crc32.w' begins with brigade.crc32"));
  EXPECT_THAT(error_of({}, {{"state", "\xff"}}),
              HasSubstr("the metadata of key 'state' must be UTF-8"));
  EXPECT_THAT(names_in_folder(), IsEmpty());
}

TEST_F(SafetensorsFileTest, LongNamesAreCutInErrors) {
  const std::string name(1000, 'w');
  EXPECT_EQ(quoted_name(name), "'" + name.substr(0, 200) + "'…");
  EXPECT_EQ(quoted_name(name.substr(0, 200)), "'" + name.substr(0, 200) + "'");
  EXPECT_EQ(quoted_name(name.substr(0, 199) + "éé"),
            "'" + name.substr(0, 199) + "'…");
  EXPECT_EQ(quoted_name("a\nb"), R"('a\nb')");
}

TEST_F(SafetensorsFileTest, PathsThatCannotBeWrittenAreErrors) {
  const absl::Status missing =
      SafetensorsWriter::create(folder_ + "/missing/file", {}).status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(message_of(missing),
              AllOf(StartsWith(folder_ + "/missing/file: cannot make a file: "),
                    HasSubstr("Check that its folder exists")));
  EXPECT_EQ(SafetensorsWriter::create(folder_, {}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(SafetensorsWriter::create("", {}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(SafetensorsFileTest, AFileThatCannotTakeItsPlaceIsRemoved) {
  SafetensorsWriter writer = writer_of({});
  std::filesystem::create_directory(path_);
  const absl::Status status = writer.finish();
  EXPECT_THAT(message_of(status),
              StartsWith(path_ + ": cannot put it in its place: "));
  EXPECT_THAT(names_in_folder(), ElementsAre("file.safetensors"));
}

TEST_F(SafetensorsFileTest, APathWithoutFolderIsInTheCurrentOne) {
  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::current_path(folder_);
  absl::StatusOr<SafetensorsWriter> writer =
      SafetensorsWriter::create("file.safetensors", {});
  ASSERT_TRUE(writer.ok());
  const absl::Status status = writer->finish();
  std::filesystem::current_path(before);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_TRUE(reader().entries().empty());
}

// Files of this process end at so many bytes, as on a disk that is full.
class FullDisk {
 public:
  explicit FullDisk(rlim_t most_bytes) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit = {.rlim_cur = most_bytes, .rlim_max = before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FullDisk() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }

 private:
  rlimit before_;
  void (*handler_)(int) = std::signal(SIGXFSZ, SIG_IGN);
};

TEST_F(SafetensorsFileTest, AFullDiskIsAnErrorAndLeavesTheFileBefore) {
  put("the file before");
  {
    const FullDisk disk(8 + 424 + 10);
    SafetensorsWriter writer = writer_of(kGoldenEntries, kGoldenMetadata);
    const absl::Status full = writer.write(0, 0, bytes_of(kGoldenData[0]));
    EXPECT_THAT(message_of(full),
                StartsWith(path_ + ": cannot write tensor 'weight': "));
    EXPECT_EQ(writer.write(0, 0, bytes_of(kGoldenData[0])), full);
    EXPECT_EQ(writer.finish(), full);
  }
  {
    const FullDisk disk(4);
    SafetensorsWriter writer = writer_of({});
    const absl::Status full = writer.finish();
    EXPECT_THAT(message_of(full),
                StartsWith(path_ + ": cannot write the header: "));
    EXPECT_THAT(names_in_folder(), ElementsAre("file.safetensors"));
  }
  EXPECT_EQ(get(), "the file before");
  EXPECT_THAT(names_in_folder(), ElementsAre("file.safetensors"));
}

}  // namespace
}  // namespace brigade
