#include "brigade/fsdp/schedule/buffer_plan.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

using Uses = std::vector<BufferUse>;

BufferPlan plan_of(const Uses& uses) {
  absl::StatusOr<BufferPlan> plan = BufferPlan::create(uses);
  EXPECT_TRUE(plan.ok()) << plan.status();
  return *plan;
}

std::vector<size_t> buffers_of(const BufferPlan& plan, const Uses& uses) {
  std::vector<size_t> buffers;
  for (size_t i = 0; i < uses.size(); ++i) buffers.push_back(plan.buffer_of(i));
  return buffers;
}

std::string error_of(const Uses& uses) {
  return std::string(BufferPlan::create(uses).status().message());
}

TEST(BufferPlanTest, NoUsesNeedNoBuffers) {
  const BufferPlan plan = plan_of({});
  EXPECT_THAT(plan.buffer_bytes(), IsEmpty());
  EXPECT_EQ(plan.total_bytes(), 0);
}

TEST(BufferPlanTest, AChainOfEqualBlocksAlternatesBetweenTwo) {
  Uses uses;
  for (int64_t i = 0; i < 6; ++i) {
    uses.push_back({.begin = i, .end = i + 2, .bytes = 64});
  }
  const BufferPlan plan = plan_of(uses);
  EXPECT_THAT(buffers_of(plan, uses), ElementsAre(0, 1, 0, 1, 0, 1));
  EXPECT_THAT(plan.buffer_bytes(), ElementsAre(64, 64));
  EXPECT_EQ(plan.total_bytes(), 128);
}

TEST(BufferPlanTest, AnOuterUnitHasABufferOfItsOwn) {
  const Uses uses = {{.begin = 0, .end = 9, .bytes = 8},
                     {.begin = 1, .end = 3, .bytes = 64},
                     {.begin = 3, .end = 5, .bytes = 64}};
  const BufferPlan plan = plan_of(uses);
  EXPECT_THAT(buffers_of(plan, uses), ElementsAre(0, 1, 1));
  EXPECT_THAT(plan.buffer_bytes(), ElementsAre(8, 64));
}

TEST(BufferPlanTest, TakesTheSmallestThatIsLargeEnough) {
  const Uses uses = {{.begin = 0, .end = 1, .bytes = 30},
                     {.begin = 0, .end = 1, .bytes = 10},
                     {.begin = 0, .end = 1, .bytes = 20},
                     {.begin = 1, .end = 2, .bytes = 15}};
  const BufferPlan plan = plan_of(uses);
  EXPECT_EQ(plan.buffer_of(3), 2u);
  EXPECT_THAT(plan.buffer_bytes(), ElementsAre(30, 10, 20));
}

TEST(BufferPlanTest, TakesOneThatFitsExactly) {
  const Uses uses = {{.begin = 0, .end = 1, .bytes = 30},
                     {.begin = 0, .end = 1, .bytes = 10},
                     {.begin = 1, .end = 2, .bytes = 10}};
  EXPECT_EQ(plan_of(uses).buffer_of(2), 1u);
}

TEST(BufferPlanTest, GrowsTheLargestFreeOneIfNoneIsLargeEnough) {
  const Uses uses = {{.begin = 0, .end = 9, .bytes = 30},
                     {.begin = 0, .end = 1, .bytes = 10},
                     {.begin = 0, .end = 1, .bytes = 20},
                     {.begin = 1, .end = 2, .bytes = 25}};
  const BufferPlan plan = plan_of(uses);
  EXPECT_EQ(plan.buffer_of(3), 2u);
  EXPECT_THAT(plan.buffer_bytes(), ElementsAre(30, 10, 25));
}

TEST(BufferPlanTest, OfEqualOnesTakesTheOneFreeLongest) {
  const Uses uses = {{.begin = 0, .end = 3, .bytes = 64},
                     {.begin = 0, .end = 2, .bytes = 64},
                     {.begin = 4, .end = 5, .bytes = 64},
                     {.begin = 5, .end = 6, .bytes = 32}};
  EXPECT_THAT(buffers_of(plan_of(uses), uses), ElementsAre(0, 1, 1, 0));
}

TEST(BufferPlanTest, UsesMayBeGivenInAnyOrder) {
  const Uses uses = {{.begin = 2, .end = 3, .bytes = 8},
                     {.begin = 0, .end = 2, .bytes = 64},
                     {.begin = 1, .end = 3, .bytes = 16}};
  const BufferPlan plan = plan_of(uses);
  EXPECT_THAT(buffers_of(plan, uses), ElementsAre(0, 0, 1));
  EXPECT_THAT(plan.buffer_bytes(), ElementsAre(64, 16));
}

TEST(BufferPlanTest, RefusesWhatIsNoUse) {
  const BufferUse good = {.begin = 0, .end = 1, .bytes = 8};
  EXPECT_THAT(error_of({good, {.begin = 4, .end = 4, .bytes = 8}}),
              HasSubstr("use 1 of 2 begins at 4 and ends at 4"));
  EXPECT_THAT(error_of({{.begin = 0, .end = 1, .bytes = -8}}),
              HasSubstr("bytes >= 0, but use 0 of 1 has -8"));
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const BufferUse large = {.begin = 0, .end = 1, .bytes = kMost};
  EXPECT_EQ(plan_of({large}).total_bytes(), kMost);
  EXPECT_THAT(error_of({large, good}), HasSubstr("exceeded by use 1 of 2"));
}

// Random uses on few positions, so that many begin and end together.
class RandomBufferPlanTest : public ::testing::TestWithParam<int64_t> {
 protected:
  Uses random_uses() {
    Uses uses(up_to(40));
    for (BufferUse& use : uses) {
      use.begin = up_to(30);
      use.end = use.begin + 1 + up_to(up_to(1) == 0 ? 3 : 20);
      use.bytes = 1 + up_to(GetParam());
    }
    return uses;
  }

  int64_t up_to(int64_t most) {
    return std::uniform_int_distribution<int64_t>(0, most)(random_);
  }

  // At each position: those that live there.
  template <typename Visit>
  static void visit_live(const Uses& uses, Visit visit) {
    for (int64_t t = 0; t < 60; ++t) {
      std::vector<size_t> live;
      for (size_t i = 0; i < uses.size(); ++i) {
        if (uses[i].begin <= t && t < uses[i].end) live.push_back(i);
      }
      visit(live);
    }
  }

 private:
  std::mt19937 random_{11};
};

TEST_P(RandomBufferPlanTest, NoTwoLiveUsesShareABufferAndEachFits) {
  for (int round = 0; round < 1000 && !HasFailure(); ++round) {
    SCOPED_TRACE(round);
    const Uses uses = random_uses();
    const BufferPlan plan = plan_of(uses);
    visit_live(uses, [&](const std::vector<size_t>& live) {
      std::set<size_t> taken;
      for (const size_t use : live) {
        EXPECT_TRUE(taken.insert(plan.buffer_of(use)).second);
      }
    });
    for (size_t i = 0; i < uses.size(); ++i) {
      EXPECT_GE(plan.buffer_bytes().at(plan.buffer_of(i)), uses[i].bytes);
    }
  }
}

TEST_P(RandomBufferPlanTest, ThereAreAsManyBuffersAsUsesAtOnce) {
  for (int round = 0; round < 1000 && !HasFailure(); ++round) {
    SCOPED_TRACE(round);
    const Uses uses = random_uses();
    size_t most = 0;
    visit_live(uses, [&](const std::vector<size_t>& live) {
      most = std::max(most, live.size());
    });
    EXPECT_EQ(plan_of(uses).buffer_bytes().size(), most);
  }
}

TEST_P(RandomBufferPlanTest, BytesLieBetweenWhatLivesAtOnceAndTheLargestUses) {
  for (int round = 0; round < 1000 && !HasFailure(); ++round) {
    SCOPED_TRACE(round);
    const Uses uses = random_uses();
    const BufferPlan plan = plan_of(uses);
    int64_t live_bytes = 0;
    visit_live(uses, [&](const std::vector<size_t>& live) {
      int64_t bytes = 0;
      for (const size_t use : live) bytes += uses[use].bytes;
      live_bytes = std::max(live_bytes, bytes);
    });
    EXPECT_GE(plan.total_bytes(), live_bytes);
    if (GetParam() == 0) {
      EXPECT_EQ(plan.total_bytes(), live_bytes);
    }

    std::vector<int64_t> largest;
    for (const BufferUse& use : uses) largest.push_back(use.bytes);
    std::ranges::sort(largest, std::greater());
    std::vector<int64_t> buffers = plan.buffer_bytes();
    std::ranges::sort(buffers, std::greater());
    for (size_t i = 0; i < buffers.size(); ++i) {
      EXPECT_LE(buffers[i], largest[i]);
    }
  }
}

TEST_P(RandomBufferPlanTest, EachBufferIsAsLargeAsItsLargestUse) {
  for (int round = 0; round < 1000 && !HasFailure(); ++round) {
    SCOPED_TRACE(round);
    const Uses uses = random_uses();
    const BufferPlan plan = plan_of(uses);
    std::vector<int64_t> needed(plan.buffer_bytes().size(), 0);
    for (size_t i = 0; i < uses.size(); ++i) {
      int64_t& bytes = needed.at(plan.buffer_of(i));
      bytes = std::max(bytes, uses[i].bytes);
    }
    EXPECT_EQ(plan.buffer_bytes(), needed);
  }
}

// Sizes differ by up to this: 0 is one size, few make many ties.
INSTANTIATE_TEST_SUITE_P(Sizes, RandomBufferPlanTest,
                         ::testing::Values(0, 2, 1000));

}  // namespace
}  // namespace brigade
