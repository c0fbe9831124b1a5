#include "brigade/fsdp/unshard_buffers.h"

#include <gtest/gtest.h>

#include <numeric>

namespace brigade {
namespace {

using Kind = ScheduleEntry::Kind;

UnitRules rules_for(size_t num_units) {
  UnitRules rules;
  rules.parents.resize(num_units);
  return rules;
}

SegmentPlan forward_of(size_t num_units) {
  SegmentPlan segment{.schedule = {}, .rules = rules_for(num_units)};
  for (size_t unit = 0; unit < num_units; ++unit) {
    segment.schedule.entries.push_back({Kind::kAllGather, unit});
    segment.schedule.accumulations.push_back(0);
  }
  return segment;
}

// As a backward learns it: each reduction after the next all-gather.
SegmentPlan backward_of(size_t num_units) {
  SegmentPlan segment{.schedule = {}, .rules = rules_for(num_units)};
  const auto append = [&](Kind kind, size_t unit) {
    segment.schedule.entries.push_back({kind, unit});
    segment.schedule.accumulations.push_back(kind == Kind::kReduceScatter ? 1
                                                                          : 0);
  };
  for (size_t unit = num_units; unit-- > 0;) {
    append(Kind::kAllGather, unit);
    if (unit + 1 < num_units) append(Kind::kReduceScatter, unit + 1);
  }
  append(Kind::kReduceScatter, 0);
  return segment;
}

TEST(BufferListTest, TakesTheSmallestThatFits) {
  BufferList list({64, 16, 32});
  EXPECT_EQ(list.acquire(20), 2);
  EXPECT_EQ(list.acquire(20), 0);
  EXPECT_EQ(list.acquire(20), 3);  // extra
  EXPECT_TRUE(list.is_extra(3));
  EXPECT_EQ(list.num_extra(), 1);
  EXPECT_EQ(list.peak_bytes(), 64 + 16 + 32 + 20);
  list.release(3);
  list.drop_extra();
  EXPECT_EQ(list.total_bytes(), 64 + 16 + 32);
}

TEST(BufferListTest, TakesThatWhichIsFreeLongest) {
  BufferList list({8, 8});
  const size_t first = list.acquire(8);
  const size_t second = list.acquire(8);
  list.release(second);
  list.release(first);
  EXPECT_EQ(list.acquire(8), second);
}

TEST(BufferPlanTest, ForwardOfEqualUnitsTakesTwo) {
  const auto forward = forward_of(8);
  const auto plan =
      plan_buffers({&forward, 1}, std::vector<UnitBytes>(8, {64, 64}));
  EXPECT_EQ(plan.buffer_bytes, (std::vector<int64_t>{64, 64}));
}

TEST(BufferPlanTest, StepOfEqualUnitsTakesTwoForWeightsAndTwoForGradients) {
  const std::vector<SegmentPlan> step = {forward_of(8), backward_of(8)};
  const auto plan = plan_buffers(step, std::vector<UnitBytes>(8, {64, 64}));
  EXPECT_EQ(plan.buffer_bytes, (std::vector<int64_t>{64, 64, 64, 64}));
  EXPECT_EQ(plan.peak_bytes, 256);
}

TEST(BufferPlanTest, UnitThatStaysHasItsOwn) {
  SegmentPlan forward = forward_of(4);
  forward.rules.stays = {1, 0, 0, 0};
  const std::vector<UnitBytes> sizes = {{256, 0}, {64, 0}, {64, 0}, {64, 0}};
  const auto plan = plan_buffers({&forward, 1}, sizes);
  EXPECT_EQ(plan.peak_bytes, 256 + 64 + 64);
}

TEST(BufferPlanTest, DepthCostsABufferEach) {
  SegmentPlan forward = forward_of(8);
  for (const size_t depth : {0, 1, 2, 3}) {
    forward.rules.prefetch_depth = depth;
    const auto plan =
        plan_buffers({&forward, 1}, std::vector<UnitBytes>(8, {64, 0}));
    EXPECT_EQ(plan.buffer_bytes.size(), depth + 1);
  }
}

TEST(BufferPlanTest, StepAsPlannedTakesNoExtraBuffer) {
  const auto forward = forward_of(6);
  std::vector<UnitBytes> sizes;
  for (const int64_t bytes : {10, 50, 20, 40, 30, 60}) sizes.push_back({bytes});
  const auto plan = plan_buffers({&forward, 1}, sizes);
  BufferList list(plan.buffer_bytes);
  SegmentCursor cursor(forward.rules, &forward.schedule);
  std::vector<size_t> buffers(6);
  const auto carry_out = [&](const CursorActions& actions) {
    for (const auto& [kind, unit] : actions) {
      if (kind == CursorAction::Kind::kAllGather) {
        buffers[unit] = list.acquire(sizes[unit].unsharded);
      } else {
        list.release(buffers[unit]);
      }
    }
  };
  carry_out(cursor.begin());
  for (size_t unit = 0; unit < 6; ++unit) {
    CursorActions actions;
    EXPECT_FALSE(cursor.need({&unit, 1}, actions));
    carry_out(actions);
  }
  EXPECT_EQ(list.num_extra(), 0);
  EXPECT_EQ(list.peak_bytes(), plan.peak_bytes);
}

}  // namespace
}  // namespace brigade
