#include <torch/torch.h>

#include <vector>

#include "brigade/reducer/bucket_memory.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

TEST(MemoryRangesTest, FindWhatLiesInOneOfThem) {
  const std::vector<at::Tensor> added = {at::ones({100}), at::ones({3}),
                                         at::ones({50})};
  MemoryRanges ranges;
  for (const at::Tensor& tensor : added) ranges.add(tensor);
  for (const at::Tensor& tensor : added) {
    EXPECT_TRUE(ranges.contains(tensor));
    EXPECT_TRUE(ranges.contains(tensor.slice(0, 1, 2)));
    EXPECT_FALSE(ranges.contains(tensor.clone()));
  }
}

TEST(MemoryRangesTest, FindMemoryThatCameAnotherWay) {
  const at::Tensor added = at::ones({4});
  MemoryRanges ranges;
  ranges.add(added);
  float* const elements = added.mutable_data_ptr<float>();
  EXPECT_TRUE(ranges.contains(torch::from_blob(elements + 3, {1})));
  EXPECT_FALSE(ranges.contains(torch::from_blob(elements + 4, {1})));
}

TEST(MemoryRangesTest, FindNothingWithoutMemory) {
  MemoryRanges ranges;
  EXPECT_FALSE(ranges.contains(at::ones({4})));
  ranges.add(at::empty({4}, at::kMeta));
  ranges.add(at::empty({0}));
  EXPECT_FALSE(ranges.contains(at::empty({4}, at::kMeta)));
  EXPECT_FALSE(ranges.contains(at::empty({0})));
}

}  // namespace
}  // namespace brigade
