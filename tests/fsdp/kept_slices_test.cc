#include "brigade/fsdp/units/kept_slices.h"

#include <torch/torch.h>

#include <vector>

#include "brigade/comm/recording_group.h"
#include "brigade/fsdp/make_units.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace kept_slices_test {

using ::testing::ElementsAre;

// On the last of four ranks, a unit of eight elements.
class KeptSlicesTest : public ::testing::Test {
 protected:
  KeptSlicesTest()
      : units_(make_units({{.name = "unit", .parameters = {{"w", weight_}}}},
                          recording_.group(),
                          {.broadcasts_parameters = false})) {}

  void keep(int num_ranks) {
    slices_.keep(0, num_ranks, version_of(units_[0]), {&memory_, 1});
  }
  void change_shards() {
    const torch::NoGradGuard no_grad;
    units_[0].shards[0].add_(1);
  }

  const RecordingGroup recording_{4, /*rank=*/3};
  at::Tensor weight_ = torch::zeros({8}).requires_grad_();
  std::vector<Unit> units_;
  MemoryPool pool_{at::kCPU};
  const ShardingStreams streams_{at::kCPU};
  const at::Tensor memory_ = torch::arange(8, torch::kFloat).view(torch::kByte);
  KeptSlices slices_{units_, streams_, pool_};
};

TEST_F(KeptSlicesTest, AreThatOfThisRankAmongItsNeighbours) {
  keep(2);
  EXPECT_THAT(slices_.holders(), ElementsAre(2));
  EXPECT_EQ(pool_.bytes(), 4 * 4);
  const at::Tensor whole = torch::zeros({8});
  slices_.write_to(whole, 0, 0);
  EXPECT_TRUE(
      at::equal(whole, torch::tensor({0, 0, 0, 0, 4, 5, 6, 7}, torch::kFloat)));
}

TEST_F(KeptSlicesTest, AreKeptOnce) {
  keep(2);
  keep(2);
  EXPECT_EQ(pool_.bytes(), 4 * 4);
}

TEST_F(KeptSlicesTest, AreNoneOfShardsThatHaveChanged) {
  keep(2);
  change_shards();
  EXPECT_THAT(slices_.holders(), ElementsAre(0));
  keep(2);
  EXPECT_THAT(slices_.holders(), ElementsAre(2));
  change_shards();
  slices_.drop_outdated();
  EXPECT_EQ(slices_.num_ranks(0), 0);
  keep(2);
  EXPECT_THAT(slices_.holders(), ElementsAre(2));
  EXPECT_EQ(pool_.num_allocations(), 1);
}

TEST_F(KeptSlicesTest, GiveTheirMemoryBack) {
  keep(2);
  slices_.drop(0);
  slices_.drop(0);
  EXPECT_THAT(slices_.holders(), ElementsAre(0));
  pool_.acquire(16);
  EXPECT_EQ(pool_.num_allocations(), 1);
}

}  // namespace kept_slices_test
}  // namespace brigade
