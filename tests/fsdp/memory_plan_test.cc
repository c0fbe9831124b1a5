#include "brigade/fsdp/schedule/memory_plan.h"

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace memory_plan_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

PlannedUnit unit_of(int64_t bytes, bool is_trained = true) {
  PlannedUnit unit;
  unit.segments.push_back(
      {.whole_bytes = bytes,
       .gradient_bytes = is_trained ? std::optional(bytes) : std::nullopt});
  return unit;
}

PlannedUnit kept(PlannedUnit unit) {
  unit.settings.reshards_after_forward = false;
  return unit;
}

// Buffers of a segment's uses, of which the model of a step has one each.
struct PlannedBuffers {
  std::optional<size_t> forward;
  std::optional<size_t> backward;
  std::optional<size_t> gradients;
  std::optional<size_t> slice;
};

PlannedBuffers of(const MemoryPlan& plan, size_t unit, size_t segment) {
  const auto buffer = [&](Purpose purpose) -> std::optional<size_t> {
    const auto buffers = plan.of({unit, segment, purpose});
    EXPECT_LE(buffers.size(), 1);
    if (buffers.empty()) return std::nullopt;
    return buffers.front();
  };
  return {.forward = buffer(Purpose::kForward),
          .backward = buffer(Purpose::kBackward),
          .gradients = buffer(Purpose::kGradients),
          .slice = buffer(Purpose::kSlice)};
}

std::vector<PlannedUnit> chain(size_t num_units, int64_t bytes = 8,
                               bool is_trained = true) {
  return std::vector<PlannedUnit>(num_units, unit_of(bytes, is_trained));
}

std::vector<UnitCall> in_order(size_t num_units) {
  std::vector<UnitCall> calls(num_units);
  for (size_t unit = 0; unit < num_units; ++unit) calls[unit].unit = unit;
  return calls;
}

MemoryPlan plan_of(const std::vector<PlannedUnit>& units, size_t depth = 1,
                   size_t max_reducing = 2) {
  absl::StatusOr<MemoryPlan> plan =
      MemoryPlan::create(units, in_order(units.size()), depth, max_reducing);
  EXPECT_TRUE(plan.ok()) << plan.status();
  return *plan;
}

PlannedUnit in_slices(PlannedUnit unit, int num_ranks) {
  unit.settings.reshards_to = num_ranks;
  for (PlannedSegment& segment : unit.segments) {
    segment.slice_bytes = *segment.whole_bytes / num_ranks;
  }
  return unit;
}

// A slice is read into the whole, so they share no memory; what comes next may
// have the slice's.
TEST(MemoryPlanTest, ASliceIsThereFromForwardToTheGatherOfBackward) {
  const std::vector<PlannedUnit> units(3, in_slices(unit_of(8, false), 2));
  std::vector<PlannedUnit> trained = units;
  trained[0] = in_slices(unit_of(8), 2);
  const MemoryPlan plan = plan_of(trained, /*depth=*/0, /*max_reducing=*/1);
  for (size_t unit = 0; unit < 3; ++unit) {
    for (size_t other = 0; other < 3; ++other) {
      if (other != unit) {
        EXPECT_NE(of(plan, unit, 0).slice, of(plan, other, 0).slice);
      }
      if (other <= unit) {
        EXPECT_NE(of(plan, other, 0).slice, of(plan, unit, 0).backward);
      }
    }
  }
  // The gradient gets a slice's, which grows.
  EXPECT_EQ(plan.total_bytes(), 8 + 8 + 2 * 4);
  // Without a backward they stay.
  EXPECT_EQ(plan_of(units, /*depth=*/0).total_bytes(), 8 + 3 * 4);
}

TEST(MemoryPlanTest, NoUnitsNeedNoMemory) {
  EXPECT_THAT(plan_of({}).buffer_bytes(), IsEmpty());
  EXPECT_EQ(plan_of({}).total_bytes(), 0);
}

// As YaFSDP has them, forward and backward.
TEST(MemoryPlanTest, EqualUnitsAlternateBetweenTwoBuffers) {
  const MemoryPlan plan = plan_of(chain(6, 8, /*is_trained=*/true));
  for (size_t unit = 0; unit < 6; ++unit) {
    EXPECT_EQ(of(plan, unit, 0).forward, unit % 2);
    if (unit == 0) continue;
    EXPECT_NE(of(plan, unit, 0).backward, of(plan, unit - 1, 0).backward);
    EXPECT_NE(of(plan, unit, 0).gradients, of(plan, unit - 1, 0).gradients);
  }
  EXPECT_THAT(plan.buffer_bytes(), ElementsAre(8, 8, 8, 8));
}

TEST(MemoryPlanTest, AChainTakesDepthAndOneMoreAndWhatIsReduced) {
  for (const size_t depth : {0, 1, 2, 3}) {
    for (const size_t max_reducing : {1, 2, 3}) {
      EXPECT_EQ(plan_of(chain(9), depth, max_reducing).total_bytes(),
                static_cast<int64_t>(depth + 1 + max_reducing) * 8);
    }
    EXPECT_EQ(plan_of(chain(9, 8, /*is_trained=*/false), depth).total_bytes(),
              static_cast<int64_t>(depth + 1) * 8);
  }
}

TEST(MemoryPlanTest, WhatIsKeptHasABufferOfItsOwnUntilItsBackward) {
  auto units = chain(4);
  units[2] = kept(units[2]);
  const MemoryPlan plan = plan_of(units);
  EXPECT_FALSE(of(plan, 2, 0).backward);
  EXPECT_NE(of(plan, 2, 0).forward, of(plan, 3, 0).forward);
  EXPECT_NE(of(plan, 2, 0).forward, of(plan, 3, 0).backward);
  EXPECT_NE(of(plan, 2, 0).forward, of(plan, 3, 0).gradients);
}

// Its gradients may come first, and be reduced last.
TEST(MemoryPlanTest, TheOutermostUnitHasBuffersForAllOfBackward) {
  auto units = chain(6, 64);
  units[0] = kept(unit_of(8));
  EXPECT_THAT(plan_of(units).buffer_bytes(),
              UnorderedElementsAre(8, 8, 64, 64, 64, 64));
}

TEST(MemoryPlanTest, GradientsOfAUnitsSegmentsComeInAnyOrder) {
  auto units = chain(3);
  for (PlannedUnit& unit : units) {
    unit.segments.push_back({.whole_bytes = 1, .gradient_bytes = 1});
  }
  for (const size_t max_reducing : {1, 2}) {
    const MemoryPlan plan = plan_of(units, /*depth=*/0, max_reducing);
    EXPECT_NE(of(plan, 1, 0).gradients, of(plan, 1, 1).gradients);
    const bool may_share = of(plan, 2, 0).gradients == of(plan, 1, 0).gradients;
    EXPECT_EQ(may_share, max_reducing == 1);
  }
}

TEST(MemoryPlanTest, WhatBackwardDoesNotReachIsNotGatheredForIt) {
  std::vector<PlannedUnit> units = chain(4, 8, /*is_trained=*/false);
  for (PlannedUnit& unit : units) unit.is_reached = false;
  units.push_back(unit_of(8));
  const MemoryPlan plan = plan_of(units, /*depth=*/1, /*max_reducing=*/1);
  for (size_t unit = 0; unit < 4; ++unit) {
    EXPECT_FALSE(of(plan, unit, 0).backward);
  }
  EXPECT_EQ(plan.total_bytes(), 2 * 8);  // a unit, and its gradient
}

TEST(MemoryPlanTest, FrozenUnitsBehindTrainedOnesAreReleased) {
  std::vector<PlannedUnit> units = chain(4, 8, /*is_trained=*/false);
  units.insert(units.begin(), unit_of(8));
  EXPECT_EQ(plan_of(units, /*depth=*/1, /*max_reducing=*/1).total_bytes(),
            2 * 8);  // that of the first one's gradient, when others are over
}

TEST(MemoryPlanTest, WhatIsNotReleasedBehindBackwardSharesWithNobody) {
  auto units = chain(5);
  units[4].settings.reshards_after_backward = false;
  const MemoryPlan plan = plan_of(units);
  for (size_t unit = 0; unit < 5; ++unit) {
    EXPECT_NE(of(plan, unit, 0).forward, of(plan, 4, 0).backward);
    EXPECT_NE(of(plan, unit, 0).gradients, of(plan, 4, 0).backward);
  }
}

TEST(MemoryPlanTest, UnitsThatBackwardDoesNotGatherTakeNothingThere) {
  auto units = chain(3);
  units[1].settings.gathers_in_backward = false;
  EXPECT_FALSE(of(plan_of(units), 1, 0).backward);
}

TEST(MemoryPlanTest, PrefetchListsCount) {
  auto units = chain(6, 8, /*is_trained=*/false);
  units[0].settings.forward_prefetch = {1, 2, 3};
  EXPECT_EQ(plan_of(units).total_bytes(), 4 * 8);
}

TEST(MemoryPlanTest, SegmentsThatAreWholeHereTakeGradientsOnly) {
  auto units = chain(3);
  for (PlannedUnit& unit : units) unit.segments[0].whole_bytes.reset();
  const MemoryPlan plan = plan_of(units);
  EXPECT_FALSE(of(plan, 1, 0).forward);
  EXPECT_FALSE(of(plan, 1, 0).backward);
  EXPECT_EQ(plan.total_bytes(), 2 * 8);
}

TEST(MemoryPlanTest, GradientsThatAreAddedUpHaveMemoryOfTheirOwn) {
  std::vector<PlannedUnit> units = chain(4);
  EXPECT_EQ(plan_of(units).total_bytes(), (2 + 2) * 8);
  for (PlannedUnit& unit : units) unit.adds_up_gradients = true;
  const MemoryPlan plan = plan_of(units);
  EXPECT_EQ(plan.total_bytes(), (2 + 4) * 8);
  std::set<size_t> gradients;
  for (size_t unit = 0; unit < units.size(); ++unit) {
    gradients.insert(*of(plan, unit, 0).gradients);
    EXPECT_NE(of(plan, 0, 0).gradients, of(plan, unit, 0).forward);
  }
  EXPECT_EQ(gradients.size(), units.size());
}

// As a list of the units in the order in which they are called would have.
TEST(MemoryPlanTest, UnitsMayBeCalledInAnyOrder) {
  std::vector<PlannedUnit> units = chain(5, 64);
  units[0] = kept(unit_of(8));
  units[3] = unit_of(16, /*is_trained=*/false);
  units[4].settings.spans_passes = true;
  const std::vector<size_t> order = {0, 4, 2, 1, 3};
  std::vector<PlannedUnit> called;
  std::vector<UnitCall> calls;
  for (const size_t unit : order) {
    called.push_back(units[unit]);
    calls.push_back({.unit = unit});
  }
  const auto plan = MemoryPlan::create(units, calls, 1, 2);
  const MemoryPlan expected = plan_of(called);
  EXPECT_EQ(plan->buffer_bytes(), expected.buffer_bytes());
  for (size_t place = 0; place < order.size(); ++place) {
    EXPECT_EQ(of(*plan, order[place], 0).forward,
              of(expected, place, 0).forward);
    EXPECT_EQ(of(*plan, order[place], 0).backward,
              of(expected, place, 0).backward);
    EXPECT_EQ(of(*plan, order[place], 0).gradients,
              of(expected, place, 0).gradients);
  }
}

// Around all others: whole, and with its gradients, while they are called.
TEST(MemoryPlanTest, AUnitAroundOthersSharesNoMemoryWithThem) {
  for (const size_t depth : {0, 1, 2}) {
    const auto units = chain(5);
    auto calls = in_order(5);
    for (size_t unit = 1; unit < 5; ++unit) calls[unit].depth = 1;
    const auto plan = MemoryPlan::create(units, calls, depth, 2);
    ASSERT_TRUE(plan.ok());
    const PlannedBuffers around = of(*plan, 0, 0);
    for (size_t unit = 1; unit < 5; ++unit) {
      const PlannedBuffers inside = of(*plan, unit, 0);
      EXPECT_NE(around.forward, inside.forward);
      EXPECT_NE(around.backward, inside.backward);
      EXPECT_NE(around.backward, inside.gradients);
      EXPECT_NE(around.gradients, inside.backward);
      EXPECT_NE(around.gradients, inside.gradients);
    }
    EXPECT_EQ(plan->total_bytes(),
              static_cast<int64_t>(8 * (2 + depth + 1 + 2)));
  }
}

// Siblings inside of it are behind each other as ever.
TEST(MemoryPlanTest, AUnitThatIsCalledBetweenOthersIsFreeWhereItEnds) {
  const auto units = chain(5);
  auto calls = in_order(5);
  calls[2].depth = calls[3].depth = 1;  // inside of 1
  const auto plan = MemoryPlan::create(units, calls, /*prefetch_depth=*/0,
                                       /*max_reducing=*/1);
  ASSERT_TRUE(plan.ok());
  EXPECT_NE(of(*plan, 1, 0).forward, of(*plan, 2, 0).forward);
  EXPECT_NE(of(*plan, 1, 0).forward, of(*plan, 3, 0).forward);
  EXPECT_EQ(of(*plan, 2, 0).forward, of(*plan, 3, 0).forward);
  EXPECT_NE(of(*plan, 1, 0).gradients, of(*plan, 2, 0).gradients);
  EXPECT_NE(of(*plan, 1, 0).gradients, of(*plan, 3, 0).gradients);
  EXPECT_EQ(plan->total_bytes(), 8 * (2 + 2));
}

TEST(MemoryPlanTest, OtherPassesAreNotPlanned) {
  EXPECT_THAT(plan_of(chain(2)).of({0, 0, Purpose::kOther}), IsEmpty());
}

TEST(MemoryPlanTest, ARecordedStepHasABufferForEachUse) {
  const MemoryUse first = {0, 0, Purpose::kForward};
  const MemoryUse second = {1, 0, Purpose::kForward};
  const MemoryUse gradients = {0, 0, Purpose::kGradients};
  UseRecord record;
  const size_t a = record.begin(first, 8);
  const size_t b = record.begin(second, 4);
  record.end(a);
  const size_t c = record.begin(first, 8);  // again, where it was
  record.begin(gradients, 16);              // which is never over
  record.end(b);
  const size_t d = record.begin(first, 8);  // again, and 4 bytes are free, too
  record.end(c);
  record.end(d);
  const auto plan = MemoryPlan::create(record.end_step());
  ASSERT_TRUE(plan.ok());
  EXPECT_THAT(plan->of(first), ElementsAre(0, 0, 2));
  EXPECT_THAT(plan->of(second), ElementsAre(2));
  EXPECT_THAT(plan->of(gradients), ElementsAre(1));
  EXPECT_THAT(plan->buffer_bytes(), ElementsAre(8, 16, 8));
  EXPECT_THAT(plan->of({2, 0, Purpose::kForward}), IsEmpty());
}

TEST(MemoryPlanTest, SufficesWhereEachUseFindsABuffer) {
  const MemoryUse first = {0, 0, Purpose::kForward};
  const MemoryUse second = {1, 0, Purpose::kForward};
  const auto use = [](const MemoryUse& what, int64_t begin, int64_t end,
                      int64_t bytes) {
    return RecordedUse{what, {.begin = begin, .end = end, .bytes = bytes}};
  };
  const auto plan = MemoryPlan::create(
      std::vector{use(first, 0, 2, 8), use(second, 1, 3, 16)});
  ASSERT_TRUE(plan.ok());
  const auto suffices = [&](const std::vector<RecordedUse>& step) {
    return plan->suffices_for(step);
  };
  EXPECT_TRUE(suffices({}));
  EXPECT_TRUE(suffices({use(first, 0, 2, 8), use(second, 1, 3, 16)}));
  EXPECT_TRUE(suffices({use(second, 0, 2, 16), use(first, 2, 3, 16)}))
      << "the other's, which is free where it begins";
  EXPECT_TRUE(suffices({use(first, 0, 2, 8), use(first, 1, 3, 8)}))
      << "the other's";
  EXPECT_FALSE(suffices(
      {use(first, 0, 3, 8), use(first, 1, 3, 8), use(second, 2, 3, 1)}));
  EXPECT_FALSE(suffices({use(first, 0, 2, 17)}));
  EXPECT_FALSE(MemoryPlan().suffices_for(std::vector{use(first, 0, 1, 1)}));
}

TEST(MemoryPlanTest, RefusesMoreBytesThanThereAre) {
  const auto units = chain(2, std::numeric_limits<int64_t>::max());
  EXPECT_THAT(
      std::string(
          MemoryPlan::create(units, in_order(2), 1, 2).status().message()),
      HasSubstr("2^63 - 1 bytes"));
}

}  // namespace memory_plan_test
}  // namespace brigade
