#include "brigade/checkpoint/safetensors.h"

#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/tests/checkpoint/checkpoint_checks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

namespace fs = std::filesystem;

using ::testing::AllOf;
using ::testing::ElementsAre;
using testing::error_of;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// Written by hand; the checksum comes from Python's zlib.crc32().
constexpr char kGoldenHeader[] =
    R"({"__metadata__":{"brigade.crc32":"e1dce462","note":"a\nb"},)"
    R"("none":{"data_offsets":[16,16],"dtype":"BF16","shape":[0,5]},)"
    R"("step":{"data_offsets":[16,24],"dtype":"I64","shape":[]},)"
    R"("weight":{"data_offsets":[0,16],"dtype":"F32","shape":[2,2]},)"
    R"("é":{"data_offsets":[24,27],"dtype":"U8","shape":[3]}}   )";
const std::vector<SafetensorsEntry> kGoldenEntries = {
    {"weight", at::kFloat, {2, 2}},
    {"none", at::kBFloat16, {0, 5}},
    {"step", at::kLong, {}},
    {"é", at::kByte, {3}}};
const SafetensorsMetadata kGoldenMetadata = {{"note", "a\nb"}};
// 1.0 to 4.0; no data; 17; "abc".
const std::vector<std::string> kGoldenData = {
    std::string("\0\0\x80\x3f\0\0\0\x40\0\0\x40\x40\0\0\x80\x40", 16), "",
    std::string("\x11\0\0\0\0\0\0\0", 8), "abc"};

std::string file_of(const std::string& header, const std::string& data) {
  std::string file;
  for (int shift = 0; shift < 64; shift += 8) {
    file += static_cast<char>(header.size() >> shift & 0xff);
  }
  return file + header + data;
}

std::string golden_file() {
  std::string data;
  for (const std::string& each : kGoldenData) data += each;
  return file_of(kGoldenHeader, data);
}

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

// Limits the size of this process's files, to simulate a full disk.
class FullDisk {
 public:
  explicit FullDisk(rlim_t most_bytes) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit = {most_bytes, before_.rlim_max};
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

class SafetensorsTest : public ::testing::Test {
 protected:
  SafetensorsTest() { fs::create_directories(folder_); }
  ~SafetensorsTest() override { fs::remove_all(folder_); }

  void put(const std::string& bytes) const {
    fs::remove(path_);
    std::ofstream(path_, std::ios::binary) << bytes;
  }

  std::vector<std::string> names_in_folder() const {
    std::vector<std::string> names;
    for (const auto& file : fs::directory_iterator(folder_)) {
      names.push_back(file.path().filename());
    }
    return names;
  }

  std::string open_error() const {
    return error_of([&] { const SafetensorsReader reader(path_); });
  }
  // Opens a file with this header and 8 bytes of data.
  std::string error_of_header(const std::string& header) const {
    put(file_of(header, "12345678"));
    return open_error();
  }

  static std::string data_of(SafetensorsReader& reader,
                             const std::string& name) {
    std::string data(reader.entries().at(name).num_bytes(), '?');
    reader.read(name, 0, std::as_writable_bytes(std::span(data)));
    return data;
  }

  static void expect_golden(SafetensorsReader& reader) {
    ASSERT_EQ(reader.entries().size(), kGoldenEntries.size());
    for (size_t e = 0; e < kGoldenEntries.size(); ++e) {
      const SafetensorsEntry& expected = kGoldenEntries[e];
      const SafetensorsEntry& found = reader.entries().at(expected.name);
      EXPECT_EQ(found.dtype, expected.dtype);
      EXPECT_EQ(found.shape, expected.shape);
      EXPECT_EQ(data_of(reader, expected.name), kGoldenData[e]);
    }
  }

  const fs::path folder_ =
      fs::path(::testing::TempDir()) /
      absl::StrCat(
          "safetensors_", ::getpid(), "_",
          ::testing::UnitTest::GetInstance()->current_test_info()->name());
  const std::string path_ = folder_ / "file.safetensors";
};

TEST_F(SafetensorsTest, WritesAndReadsTheGoldenFile) {
  for (const size_t most_bytes : {size_t{1}, size_t{5}, size_t{100}}) {
    SafetensorsWriter writer(path_, kGoldenEntries, kGoldenMetadata);
    for (const std::string& data : kGoldenData) {
      for (size_t begin = 0; begin < data.size(); begin += most_bytes) {
        writer.write(bytes_of(data.substr(begin, most_bytes)));
      }
    }
    writer.finish();
    EXPECT_EQ(testing::bytes_of_file(path_), golden_file());
  }
  SafetensorsReader reader(path_);
  EXPECT_EQ(reader.metadata(), kGoldenMetadata);
  expect_golden(reader);
  std::string part(5, '?');
  reader.read("weight", 3, std::as_writable_bytes(std::span(part)));
  EXPECT_EQ(part, kGoldenData[0].substr(3, 5));
  EXPECT_THAT(
      error_of([&] {
        reader.read("weight", 12, std::as_writable_bytes(std::span(part)));
      }),
      HasSubstr("'weight' has 16 bytes, got a range of 5 from byte 12"));
  EXPECT_THAT(error_of([&] { reader.read("bias", 0, {}); }),
              HasSubstr("has no tensor 'bias'"));
}

// No checksum, another order, spaces after the header.
TEST_F(SafetensorsTest, ReadsFilesOfOtherPrograms) {
  put(file_of(R"({"b":{"dtype":"F16","shape":[1,2],"data_offsets":[4,8]},)"
              R"("a":{"dtype":"I8","shape":[4],"data_offsets":[0,4]},)"
              R"("none":{"dtype":"F64","shape":[3,0],"data_offsets":[4,4]}}  )",
              "12345678"));
  SafetensorsReader reader(path_);
  EXPECT_EQ(data_of(reader, "a"), "1234");
  EXPECT_EQ(data_of(reader, "b"), "5678");
  EXPECT_EQ(data_of(reader, "none"), "");
}

TEST_F(SafetensorsTest, MapsDtypesToTheFormatsNames) {
  for (const auto& [name, dtype] :
       std::vector<std::pair<std::string, c10::ScalarType>>{
           {"BOOL", at::kBool},
           {"U8", at::kByte},
           {"F8_E4M3", at::kFloat8_e4m3fn},
           {"BF16", at::kBFloat16},
           {"F32", at::kFloat},
           {"C64", at::kComplexFloat},
           {"I64", at::kLong}}) {
    EXPECT_EQ(safetensors_dtype_name(dtype), name);
    EXPECT_EQ(safetensors_dtype(name), dtype);
  }
  EXPECT_THAT(error_of([] { safetensors_dtype_name(at::kComplexDouble); }),
              HasSubstr("no dtype ComplexDouble"));
}

TEST_F(SafetensorsTest, ATruncatedFileIsAnErrorThatNamesIt) {
  const std::string file = golden_file();
  for (size_t length = 0; length < file.size(); ++length) {
    put(file.substr(0, length));
    ASSERT_THAT(open_error(),
                AllOf(StartsWith(path_ + ": "), HasSubstr("use another copy")))
        << length;
  }
  put(file + '\0');
  EXPECT_THAT(open_error(), HasSubstr("the data must end at byte 27"));
}

// A flip in the checksum's key leaves a file without a checksum, which opens.
TEST_F(SafetensorsTest, AFlippedBitIsAnErrorThatNamesTheFile) {
  int num_open = 0;
  for (size_t bit = 0; bit < golden_file().size() * 8; ++bit) {
    std::string file = golden_file();
    file[bit / 8] = static_cast<char>(file[bit / 8] ^ 1 << bit % 8);
    put(file);
    const std::string error = error_of([&] {
      SafetensorsReader reader(path_);
      ++num_open;
      EXPECT_EQ(reader.metadata().size(), 2u);
      expect_golden(reader);
    });
    if (error != "no error") {
      ASSERT_THAT(error, StartsWith(path_ + ": ")) << bit;
    }
  }
  EXPECT_LE(num_open, 8 * 13);
}

TEST_F(SafetensorsTest, AHeaderThatContradictsItselfIsAnError) {
  const auto error_of_entry = [&](const std::string& fields) {
    return error_of_header(R"({"w":{)" + fields + "}}");
  };
  EXPECT_EQ(error_of_entry(R"("dtype":"F32","shape":[2],"data_offsets":[0,8])"),
            "no error")
      << "each header below differs from this one";

  // JSON.
  EXPECT_THAT(error_of_header(""), HasSubstr("must begin with '{'"));
  EXPECT_THAT(error_of_header(" {}"), HasSubstr("must begin with '{'"));
  EXPECT_THAT(error_of_header(std::string("{}\0", 3)),
              HasSubstr("contain no NUL"));
  for (const std::string text :
       {"{", "{}}", "{\"\xff\":1}", R"({"w":1e999})"}) {
    EXPECT_THAT(error_of_header(text), HasSubstr("not valid JSON"));
  }
  const std::string deep =
      std::string(100'000, '[') + std::string(100'000, ']');
  EXPECT_THAT(error_of_header(R"({"w":)" + deep + "}"),
              HasSubstr("must have exactly a dtype"));
  EXPECT_THAT(error_of_entry(R"("dtype":"F32","shape":[2],)"
                             R"("data_offsets":[0,8],"more":)" +
                             deep),
              HasSubstr("must have exactly a dtype"));
  EXPECT_THAT(error_of_header(R"({"__metadata__":{"step":)" + deep +
                              R"(},"w":{"dtype":"F32","shape":[2],)"
                              R"("data_offsets":[0,8]}})"),
              HasSubstr("must be an object of strings"));
  EXPECT_THAT(error_of_header(R"({"w":1})"),
              HasSubstr("must have exactly a dtype"));

  // Dtypes and shapes.
  for (const std::string dtype : {"\"F4\"", "\"f32\"", "1"}) {
    EXPECT_THAT(error_of_entry(absl::StrCat(
                    R"("shape":[2],"data_offsets":[0,8],"dtype":)", dtype)),
                HasSubstr("'w' must have exactly a dtype"));
  }
  for (const std::string shape :
       {"null", "2", "[-2]", "[2.0]", "[\"2\"]", "[9223372036854775808]"}) {
    EXPECT_THAT(error_of_entry(absl::StrCat(
                    R"("dtype":"F32","data_offsets":[0,8],"shape":)", shape)),
                HasSubstr("'w' must have exactly a dtype"));
  }
  EXPECT_THAT(
      error_of_entry(R"("dtype":"F64","shape":[2],"data_offsets":[0,8])"),
      HasSubstr("is F64 of shape [2], which is 16 bytes, but has"));
  // 2^62 + 2 elements, whose bytes are 8 modulo 2^64.
  EXPECT_THAT(error_of_entry(R"("dtype":"F32","shape":[2305843009213693953,2],)"
                             R"("data_offsets":[0,8])"),
              HasSubstr("which is more than 2^62 bytes"));

  // Offsets.
  for (const std::string offsets : {"[0]", "[0,4,8]", "[-8,0]", "8", "[0,8.0]",
                                    "[0,18446744073709551615]"}) {
    EXPECT_THAT(error_of_entry(absl::StrCat(
                    R"("dtype":"F32","shape":[2],"data_offsets":)", offsets)),
                HasSubstr("a shape and two data_offsets, all integers >= 0"));
  }
  EXPECT_THAT(
      error_of_entry(R"("dtype":"F32","shape":[2],"data_offsets":[8,0])"),
      HasSubstr("which is 8 bytes, but has data_offsets [8, 0]"));
  EXPECT_THAT(
      error_of_entry(R"("dtype":"F32","shape":[1],"data_offsets":[4,8])"),
      HasSubstr("must begin at byte 0 of the data"));
  EXPECT_THAT(error_of_header(
                  R"({"v":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                  R"("w":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})"),
              HasSubstr("'w' must begin at byte 8 of the data"));
}

TEST_F(SafetensorsTest, AWrongHeaderLengthIsAnErrorBeforeTheHeaderIsRead) {
  using namespace std::string_literals;
  const auto error_of_length = [&](const std::string& length,
                                   int64_t file_bytes) {
    put(length);
    fs::resize_file(path_, file_bytes);
    return open_error();
  };
  EXPECT_THAT(error_of_length("\x09\0\0\0\0\0\0\0"s, 16),
              HasSubstr("its header has 9 bytes, but it can have at most 8"));
  EXPECT_THAT(error_of_length("\xff\xff\xff\xff\xff\xff\xff\xff"s, 16),
              HasSubstr("18446744073709551615 bytes"));
  // 100,000,001, in a sparse file that is long enough.
  EXPECT_THAT(error_of_length("\x01\xe1\xf5\x05\0\0\0\0"s, 200'000'000),
              HasSubstr("at most 100000000"));
}

TEST_F(SafetensorsTest, RandomDamageNeverCrashesAndNeverChangesTensors) {
  std::mt19937 random(97);
  const auto up_to = [&](size_t most) {
    return std::uniform_int_distribution<size_t>(0, most)(random);
  };
  const std::string of_another_program =
      file_of(R"({"a":{"dtype":"F32","shape":[2,50],"data_offsets":[0,400]},)"
              R"("b":{"dtype":"I8","shape":[0],"data_offsets":[400,400]}})",
              std::string(400, 'x'));
  int num_open = 0;
  for (int round = 0; round < 6000; ++round) {
    std::string file = round % 2 ? golden_file() : of_another_program;
    for (size_t flips = up_to(2) + 1; flips > 0; --flips) {
      const size_t at = up_to(file.size() - 1);
      switch (up_to(4)) {
        case 0:
          file.insert(at, 1, file[up_to(file.size() - 1)]);
          break;
        case 1:
          file.erase(at, 1);
          break;
        case 2:  // a character with a meaning in JSON
          file[at] = "{}[],:\"0129-.e\\ "[up_to(15)];
          break;
        default:
          file[at] = static_cast<char>(file[at] ^ 1 << up_to(7));
      }
    }
    put(file);
    SCOPED_TRACE(round);
    error_of([&] {
      SafetensorsReader reader(path_);
      ++num_open;
      size_t num_bytes = 0;
      for (const auto& [name, entry] : reader.entries()) {
        num_bytes += data_of(reader, name).size();
      }
      EXPECT_LE(num_bytes, file.size());
      if (reader.metadata() == kGoldenMetadata) expect_golden(reader);
    });
  }
  EXPECT_GT(num_open, 300) << "too few files reached the data";
}

TEST_F(SafetensorsTest, AReaderReadsTheFileThatItOpened) {
  put(golden_file());
  SafetensorsReader reader(path_);
  SafetensorsWriter(path_, {}).finish();
  EXPECT_TRUE(SafetensorsReader(path_).entries().empty());
  expect_golden(reader);
  put(golden_file());
  SafetensorsReader cut(path_);
  fs::resize_file(path_, golden_file().size() - 5);
  EXPECT_THAT(error_of([&] { data_of(cut, "step"); }),
              HasSubstr("is shorter than when it was opened"));
}

TEST_F(SafetensorsTest, OnlyFinishReplacesThePreviousFile) {
  put("the previous file");
  {
    SafetensorsWriter first(path_, kGoldenEntries);
    SafetensorsWriter second(path_, kGoldenEntries);
    first.write(bytes_of(kGoldenData[0]));
    EXPECT_THAT(error_of([&] { first.finish(); }), HasSubstr("after all data"));
    for (const std::string& data : kGoldenData) second.write(bytes_of(data));
    const FullDisk disk(10);
    EXPECT_THAT(error_of([&] { second.finish(); }),
                HasSubstr("cannot write it"));
    EXPECT_EQ(names_in_folder().size(), 3u);
  }
  EXPECT_EQ(testing::bytes_of_file(path_), "the previous file");
  EXPECT_THAT(names_in_folder(), ElementsAre("file.safetensors"));
}

TEST_F(SafetensorsTest, InvalidEntriesAndPathsAreErrors) {
  const auto error_of_writer = [&](std::vector<SafetensorsEntry> entries,
                                   SafetensorsMetadata metadata = {}) {
    return error_of([&] { SafetensorsWriter(path_, entries, metadata); });
  };
  EXPECT_THAT(error_of_writer({{"a"}, {"a"}}), HasSubstr("used twice"));
  EXPECT_THAT(error_of_writer({{"__metadata__"}}), HasSubstr("reserved"));
  EXPECT_THAT(error_of_writer({{"\xff"}}), HasSubstr("must be UTF-8"));
  EXPECT_THAT(error_of([&] { SafetensorsWriter(folder_, {}); }),
              HasSubstr("expected the path of a safetensors file"));
  EXPECT_THAT(error_of([&] { SafetensorsWriter(path_ + "/none", {}); }),
              HasSubstr("cannot open it"));
  EXPECT_THAT(open_error(), HasSubstr("No such file or directory"));
}

}  // namespace
}  // namespace brigade
