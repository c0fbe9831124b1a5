#include "brigade/examples/digits/batches.h"

#include <set>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade::digits {
namespace {

using ::testing::HasSubstr;

// Images that can be told apart by their label.
DigitImages numbered_images(int64_t count) {
  return {.pixels = at::zeros({count, 1, 8, 8}),
          .labels = at::arange(count, at::kLong)};
}

std::vector<int64_t> labels_of(const DigitImages& images) {
  const int64_t* const labels = images.labels.const_data_ptr<int64_t>();
  return {labels, labels + images.labels.numel()};
}

TEST(BatchesTest, NoImageIsSeenTwiceInAnEpoch) {
  const Batches batches(numbered_images(100), /*batch_size=*/12,
                        /*num_ranks=*/3, /*seed=*/1);
  ASSERT_EQ(batches.steps_per_epoch(), 8);
  const Batches::Epoch epoch = batches.epoch(0);
  std::set<int64_t> seen;
  for (int64_t step = 0; step < 8; ++step) {
    for (int rank = 0; rank < 3; ++rank) {
      const std::vector<int64_t> labels = labels_of(epoch.batch(step, rank));
      EXPECT_EQ(labels.size(), 4);
      seen.insert(labels.begin(), labels.end());
    }
  }
  EXPECT_EQ(seen.size(), 96);
}

TEST(BatchesTest, AStepHasTheSameImagesForAnyNumberOfRanks) {
  const auto images_of_step = [](int num_ranks) {
    const Batches batches(numbered_images(100), /*batch_size=*/12, num_ranks,
                          /*seed=*/1);
    const Batches::Epoch epoch = batches.epoch(2);
    std::vector<int64_t> labels;
    for (int rank = 0; rank < num_ranks; ++rank) {
      for (int64_t label : labels_of(epoch.batch(3, rank))) {
        labels.push_back(label);
      }
    }
    return labels;
  };
  EXPECT_EQ(images_of_step(1), images_of_step(4));
}

TEST(BatchesTest, EpochsDiffer) {
  const Batches batches(numbered_images(100), 10, 1, 1);
  EXPECT_NE(labels_of(batches.epoch(0).batch(0, 0)),
            labels_of(batches.epoch(1).batch(0, 0)));
}

TEST(BatchesTest, UnevenBatchIsMadeSmaller) {
  const Batches batches(numbered_images(100), 20, 3, 1);
  EXPECT_EQ(batches.images_per_rank(), 6);
  EXPECT_EQ(batches.images_per_step(), 18);
}

TEST(BatchesTest, BatchSmallerThanTheWorldIsAnError) {
  try {
    Batches(numbered_images(100), 3, 4, 1);
    FAIL() << "no error";
  } catch (const c10::ValueError& error) {
    EXPECT_THAT(error.what(),
                HasSubstr("a batch of 3 images is too small for 4 ranks"));
  }
}

TEST(BatchesTest, BatchLargerThanAllImagesIsAnError) {
  try {
    Batches(numbered_images(100), 101, 1, 1);
    FAIL() << "no error";
  } catch (const c10::ValueError& error) {
    EXPECT_THAT(error.what(), HasSubstr("a batch of 101 images is too large"));
  }
}

}  // namespace
}  // namespace brigade::digits
