#include "brigade/examples/digits/dataset.h"

#include <zlib.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <memory>
#include <random>
#include <string_view>

#include "brigade/examples/digits/shuffle.h"

namespace brigade::digits {
namespace {

constexpr int64_t kSide = 8;
constexpr int64_t kNumPixels = kSide * kSide;
constexpr int64_t kMaxPixel = 16;

std::string read_gzip(const std::string& path) {
  struct Close {
    void operator()(gzFile file) const { gzclose(file); }
  };
  std::unique_ptr<gzFile_s, Close> file(gzopen(path.c_str(), "rb"));
  TORCH_CHECK_VALUE(file, "cannot open the data file '", path,
                    "'; --data names another one");
  std::string text;
  std::array<char, 1 << 16> block;
  int count = 0;
  while ((count = gzread(file.get(), block.data(), block.size())) > 0) {
    text.append(block.data(), count);
  }
  int error = Z_OK;
  const char* what = gzerror(file.get(), &error);
  TORCH_CHECK_VALUE(error == Z_OK || error == Z_STREAM_END,
                    "cannot read the data file '", path, "': ", what);
  return text;
}

// The numbers of a line, or nothing if one is no number.
std::vector<int64_t> parse_line(std::string_view line) {
  std::vector<int64_t> numbers;
  const char* next = line.data();
  const char* const end = line.data() + line.size();
  while (true) {
    int64_t number = 0;
    const auto [stop, error] = std::from_chars(next, end, number);
    if (error != std::errc{}) return {};
    numbers.push_back(number);
    if (stop == end) return numbers;
    if (*stop != ',') return {};
    next = stop + 1;
  }
}

bool is_digit_line(const std::vector<int64_t>& numbers) {
  if (numbers.size() != kNumPixels + 1) return false;
  const auto is_pixel = [](int64_t n) { return n >= 0 && n <= kMaxPixel; };
  return std::all_of(numbers.begin(), numbers.end() - 1, is_pixel) &&
         numbers.back() >= 0 && numbers.back() < kNumClasses;
}

}  // namespace

std::string default_data_file() { return DIGITS_DATA_FILE; }

DigitImages read_digits(const std::string& path) {
  const std::string text = read_gzip(path);
  std::vector<float> pixels;
  std::vector<int64_t> labels;
  std::string_view rest = text;
  while (!rest.empty()) {
    std::string_view line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(rest.size(), line.size() + 1));
    if (line.ends_with('\r')) line.remove_suffix(1);
    const std::vector<int64_t> numbers = parse_line(line);
    TORCH_CHECK_VALUE(is_digit_line(numbers), path, ", line ",
                      labels.size() + 1,
                      ": expected 64 pixels from 0 to 16 and a digit, "
                      "separated by commas, found '",
                      std::string(line.substr(0, 40)), "'");
    pixels.insert(pixels.end(), numbers.begin(), numbers.end() - 1);
    labels.push_back(numbers.back());
  }
  TORCH_CHECK_VALUE(!labels.empty(), "the data file '", path, "' is empty");
  const auto count = static_cast<int64_t>(labels.size());
  return {.pixels = at::tensor(pixels).view({count, 1, kSide, kSide}) /
                    static_cast<float>(kMaxPixel),
          .labels = at::tensor(labels)};
}

DigitSplit split_digits(const at::Tensor& labels, uint32_t seed,
                        int64_t num_test) {
  const int64_t total = labels.numel();
  TORCH_CHECK_VALUE(num_test >= 0 && num_test <= total,
                    "the test set must have 0 to ", total,
                    " images, as many as there are; got ", num_test);
  std::array<std::vector<int64_t>, kNumClasses> rows_of;
  for (int64_t row = 0; row < total; ++row) {
    rows_of.at(labels[row].item<int64_t>()).push_back(row);
  }

  // Largest remainders: every digit gets its share rounded down, and those that
  // lost most get one of the images that are left.
  std::array<int64_t, kNumClasses> take = {};
  std::array<int64_t, kNumClasses> by_remainder = {};
  int64_t left = num_test;
  for (int64_t digit = 0; digit < kNumClasses; ++digit) {
    by_remainder[digit] = digit;
    take[digit] =
        static_cast<int64_t>(rows_of[digit].size()) * num_test / total;
    left -= take[digit];
  }
  const auto remainder = [&](int64_t digit) {
    return static_cast<int64_t>(rows_of[digit].size()) * num_test % total;
  };
  std::stable_sort(
      by_remainder.begin(), by_remainder.end(),
      [&](int64_t a, int64_t b) { return remainder(a) > remainder(b); });
  for (int64_t i = 0; i < left; ++i) ++take[by_remainder[i]];

  std::mt19937 random(seed);
  DigitSplit split;
  for (int64_t digit = 0; digit < kNumClasses; ++digit) {
    std::vector<int64_t>& rows = rows_of[digit];
    shuffle(rows, random);
    const auto border = rows.begin() + take[digit];
    split.test.insert(split.test.end(), rows.begin(), border);
    split.train.insert(split.train.end(), border, rows.end());
  }
  std::sort(split.train.begin(), split.train.end());
  std::sort(split.test.begin(), split.test.end());
  return split;
}

DigitImages select(const DigitImages& images,
                   const std::vector<int64_t>& rows) {
  const at::Tensor index = at::tensor(rows, at::kLong);
  return {.pixels = images.pixels.index_select(0, index),
          .labels = images.labels.index_select(0, index)};
}

}  // namespace brigade::digits
