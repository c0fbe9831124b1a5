#include "brigade/examples/digits/dataset.h"

#include <zlib.h>

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <numeric>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade::digits {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr uint32_t kSeed = 1;

std::vector<int64_t> count_per_digit(const at::Tensor& labels) {
  const at::Tensor counts = at::bincount(labels, {}, kNumClasses);
  return {counts.const_data_ptr<int64_t>(),
          counts.const_data_ptr<int64_t>() + kNumClasses};
}

// Of the rows and their order.
uint32_t checksum(const std::vector<int64_t>& rows) {
  return crc32(0, reinterpret_cast<const Bytef*>(rows.data()),
               rows.size() * sizeof(rows[0]));
}

class DatasetTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    digits_ = new DigitImages(read_digits(default_data_file()));
  }
  static void TearDownTestSuite() {
    delete digits_;
    digits_ = nullptr;
  }
  static const DigitImages& digits() { return *digits_; }

 private:
  inline static DigitImages* digits_ = nullptr;
};

TEST_F(DatasetTest, ReadsAllImagesAndScalesTheirPixels) {
  EXPECT_THAT(digits().pixels.sizes(), ElementsAre(1797, 1, 8, 8));
  EXPECT_EQ(digits().pixels.min().item<float>(), 0.0F);
  EXPECT_EQ(digits().pixels.max().item<float>(), 1.0F);
  // First line: 0,0,5,13,9,1,0,0, ...; its digit is 0.
  EXPECT_EQ(digits().pixels[0][0][0][3].item<float>(), 13.0F / 16.0F);
  EXPECT_THAT(count_per_digit(digits().labels),
              ElementsAre(178, 182, 177, 183, 181, 182, 181, 179, 174, 180));
}

TEST_F(DatasetTest, SplitGivesEveryDigitItsShareOfTheTest) {
  const DigitSplit split = split_digits(digits().labels, kSeed);
  EXPECT_EQ(split.train.size(), 1437);
  EXPECT_THAT(count_per_digit(select(digits(), split.test).labels),
              ElementsAre(36, 37, 35, 37, 36, 36, 36, 36, 35, 36));
}

TEST_F(DatasetTest, SplitUsesEveryImageOnce) {
  const DigitSplit split = split_digits(digits().labels, kSeed);
  std::vector<int64_t> rows;
  std::merge(split.train.begin(), split.train.end(), split.test.begin(),
             split.test.end(), std::back_inserter(rows));
  std::vector<int64_t> all(1797);
  std::iota(all.begin(), all.end(), 0);
  EXPECT_EQ(rows, all);
}

TEST_F(DatasetTest, SplitIsTheSameOnEveryMachine) {
  const DigitSplit split = split_digits(digits().labels, kSeed);
  EXPECT_EQ(checksum(split.test), 1201450888);
  EXPECT_EQ(checksum(split.train), 1914165097);
}

TEST_F(DatasetTest, AnotherSeedGivesAnotherSplit) {
  EXPECT_NE(split_digits(digits().labels, kSeed).test,
            split_digits(digits().labels, kSeed + 1).test);
}

TEST_F(DatasetTest, MissingFileIsNamed) {
  try {
    read_digits("/nowhere/digits.csv.gz");
    FAIL() << "no error";
  } catch (const c10::ValueError& error) {
    EXPECT_THAT(
        error.what(),
        HasSubstr("cannot open the data file '/nowhere/digits.csv.gz'"));
  }
}

TEST_F(DatasetTest, WrongLineIsNamed) {
  const std::string path = ::testing::TempDir() + "/wrong_digits.csv";
  std::string good_line;
  for (int i = 0; i < 64; ++i) good_line += "16,";
  std::FILE* file = std::fopen(path.c_str(), "w");
  std::fputs((good_line + "9\n" + good_line + "10\n").c_str(), file);
  std::fclose(file);
  try {
    read_digits(path);
    FAIL() << "no error";
  } catch (const c10::ValueError& error) {
    EXPECT_THAT(error.what(), HasSubstr("line 2: expected 64 pixels"));
  }
  std::remove(path.c_str());
}

}  // namespace
}  // namespace brigade::digits
