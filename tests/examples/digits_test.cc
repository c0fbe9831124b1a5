#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "brigade/examples/digits/dataset.h"

namespace brigade::digits {
namespace {

// Images whose labels are 0 to count - 1.
DigitImages numbered_images(int64_t count) {
  return {.pixels = at::zeros({count, 1, 8, 8}),
          .labels = at::arange(count, at::kLong)};
}

std::vector<int64_t> labels_of(const Batches& batches, int64_t step) {
  std::vector<int64_t> labels;
  for (int rank = 0; rank < batches.num_ranks(); ++rank) {
    const at::Tensor found = batches.batch(step, rank).labels;
    const auto* const data = found.const_data_ptr<int64_t>();
    labels.insert(labels.end(), data, data + found.numel());
  }
  return labels;
}

TEST(DigitsTest, ReadsAllImagesAndScalesTheirPixels) {
  const DigitImages digits = read_digits();
  EXPECT_EQ(digits.pixels.sizes(), (at::IntArrayRef{1797, 1, 8, 8}));
  EXPECT_EQ(digits.pixels.min().item<float>(), 0.0F);
  EXPECT_EQ(digits.pixels.max().item<float>(), 1.0F);
  // First image: 0,0,5,13,9,1,0,0, ...; its digit is 0.
  EXPECT_EQ(digits.pixels[0][0][0][3].item<float>(), 13.0F / 16.0F);
  EXPECT_TRUE(at::equal(
      at::bincount(digits.labels),
      at::tensor({178, 182, 177, 183, 181, 182, 181, 179, 174, 180})));
}

TEST(DigitsTest, NoImageIsSeenTwiceInAnEpoch) {
  const Batches batches(numbered_images(100), /*batch_size=*/14,
                        /*num_ranks=*/3, /*seed=*/1);
  EXPECT_EQ(batches.images_per_step(), 12);  // a multiple of 3
  ASSERT_EQ(batches.steps_per_epoch(), 8);
  std::set<int64_t> seen;
  for (int64_t step = 0; step < 8; ++step) {
    const std::vector<int64_t> labels = labels_of(batches, step);
    seen.insert(labels.begin(), labels.end());
  }
  EXPECT_EQ(seen.size(), 96);
}

TEST(DigitsTest, AStepHasTheSameImagesOnAnyNumberOfRanks) {
  const Batches alone(numbered_images(100), 12, 1, 1);
  const Batches on_4_ranks(numbered_images(100), 12, 4, 1);
  EXPECT_EQ(labels_of(alone, 19), labels_of(on_4_ranks, 19));
  EXPECT_NE(labels_of(alone, 0), labels_of(alone, 8));  // another epoch
}

TEST(DigitsTest, ABatchThatIsTooSmallOrTooLargeIsAnError) {
  EXPECT_THROW(Batches(numbered_images(100), 3, 4, 1), c10::ValueError);
  EXPECT_THROW(Batches(numbered_images(100), 101, 1, 1), c10::ValueError);
}

}  // namespace
}  // namespace brigade::digits
