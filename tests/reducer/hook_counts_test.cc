#include "brigade/reducer/hook_counts.h"

#include <cstddef>
#include <initializer_list>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

HookCounts after_a_backward(HookCounts counts,
                            std::initializer_list<size_t> runs) {
  counts.restart();
  for (const size_t variable : runs) counts.count_run(variable);
  counts.freeze();
  return counts;
}

TEST(HookCountsTest, HoldLaterIterationsToTheFirst) {
  HookCounts counts(3);
  counts.restart();
  for (const size_t variable : {2, 0, 2}) {
    EXPECT_FALSE(counts.count_run(variable));
  }
  EXPECT_THAT(counts.freeze(), ElementsAre(0, 2));
  EXPECT_THAT(counts.silent(), ElementsAre(1));
  counts.confirm();
  counts.restart();
  EXPECT_FALSE(counts.count_run(2));
  EXPECT_TRUE(counts.count_run(0));
  EXPECT_TRUE(counts.count_run(2));
  EXPECT_TRUE(counts.is_silent(1));
  EXPECT_FALSE(counts.is_silent(2));
}

TEST(HookCountsTest, LearnAnewIfTheFirstIterationIsAborted) {
  HookCounts counts = after_a_backward(HookCounts(2), {0});
  counts.abort();
  EXPECT_TRUE(counts.are_all_learning());
  counts = after_a_backward(counts, {1});
  EXPECT_THAT(counts.silent(), ElementsAre(0));
}

TEST(HookCountsTest, StayIfALaterIterationIsAborted) {
  HookCounts counts = after_a_backward(HookCounts(2), {0});
  counts.confirm();
  counts.restart();
  counts.abort();
  EXPECT_FALSE(counts.is_learning());
  EXPECT_THAT(counts.silent(), ElementsAre(1));
}

TEST(HookCountsTest, AreLearntAloneBehindAnIterationThatOnlyOthersCounted) {
  HookCounts counts(2);
  counts.confirm();
  EXPECT_TRUE(counts.is_learning());
  EXPECT_FALSE(counts.are_all_learning());
  counts = after_a_backward(counts, {0, 1});
  counts.abort();  // peers would not count with it
  EXPECT_FALSE(counts.is_learning());
  EXPECT_THAT(counts.silent(), IsEmpty());
}

TEST(HookCountsTest, AnIterationThatIsAbortedBeforeItIsCountedTeachesNothing) {
  HookCounts counts(1);
  counts.restart();
  counts.count_run(0);
  counts.abort();
  EXPECT_TRUE(counts.are_all_learning());
  counts = after_a_backward(counts, {0});
  counts.restart();
  EXPECT_TRUE(counts.count_run(0));
}

}  // namespace
}  // namespace brigade
