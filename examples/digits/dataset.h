// The handwritten digits: reads the file, and splits it into images to train
// with and images to test with.  Which rank sees which image in which step is
// decided in batches.h.

#ifndef BRIGADE_EXAMPLES_DIGITS_DATASET_H_
#define BRIGADE_EXAMPLES_DIGITS_DATASET_H_

#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

namespace brigade::digits {

constexpr int64_t kNumClasses = 10;
constexpr int64_t kNumTestImages = 360;  // of 1,797; the rest is for training

struct DigitImages {
  at::Tensor pixels;  // float32, [n, 1, 8, 8], from 0 to 1
  at::Tensor labels;  // int64, [n], from 0 to 9
};

// Where the file lies in the source tree.
std::string default_data_file();

// Reads a gzipped CSV file: a line per image, 64 pixels from 0 to 16, the
// digit.
//
// Errors: c10::ValueError naming the file, and the line that is wrong.
DigitImages read_digits(const std::string& path);

// Row numbers.
struct DigitSplit {
  std::vector<int64_t> train;
  std::vector<int64_t> test;
};

// Chooses `num_test` rows by `seed`, so that each digit has the same share of
// the test rows as of all rows, to the nearest whole image.  Both lists are in
// ascending order.
//
// Errors: c10::ValueError if num_test is not between 0 and the number of rows.
DigitSplit split_digits(const at::Tensor& labels, uint32_t seed,
                        int64_t num_test = kNumTestImages);

DigitImages select(const DigitImages& images, const std::vector<int64_t>& rows);

}  // namespace brigade::digits

#endif  // BRIGADE_EXAMPLES_DIGITS_DATASET_H_
