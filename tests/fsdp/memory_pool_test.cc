#include "brigade/fsdp/memory/memory_pool.h"

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace brigade {
namespace {

MemoryUse use(size_t unit) { return {unit, 0, Purpose::kForward}; }

// A buffer of these bytes for the use of each unit.
MemoryPlan plan_with_buffers(const std::vector<int64_t>& bytes) {
  UseRecord record;
  for (size_t unit = 0; unit < bytes.size(); ++unit) {
    record.begin(use(unit), bytes[unit]);
  }
  return *MemoryPlan::create(record.end_step());
}

TEST(MemoryPoolTest, APlannedBufferIsMadeWhenItIsFirstUsedAndLentAgain) {
  MemoryPool pool(at::kCPU);
  pool.plan(plan_with_buffers({64, 16}));
  EXPECT_EQ(pool.bytes(), 0);
  Buffer buffer = pool.acquire(8, use(0));
  const void* const memory = buffer.memory.data_ptr();
  EXPECT_EQ(buffer.memory.numel(), 64);
  pool.release(std::move(buffer));
  EXPECT_EQ(pool.acquire(60, use(0)).memory.data_ptr(), memory);
  EXPECT_EQ(pool.acquire(16, use(1)).memory.numel(), 16);
  EXPECT_EQ(pool.num_allocations(), 2);
  EXPECT_EQ(pool.num_unplanned(), 0);
  EXPECT_EQ(pool.peak_bytes(), 80);
}

TEST(MemoryPoolTest, WhoFindsItsBufferLentTakesTheSmallestThatFits) {
  MemoryPool pool(at::kCPU);
  pool.plan(plan_with_buffers({64, 32, 16}));
  const Buffer own = pool.acquire(16, use(2));
  EXPECT_EQ(pool.acquire(16, use(2)).memory.numel(), 32);
  EXPECT_EQ(pool.acquire(16).memory.numel(), 64);
  EXPECT_EQ(pool.num_unplanned(), 0);
  EXPECT_EQ(pool.acquire(16, use(2)).memory.numel(), 16);
  EXPECT_EQ(pool.num_unplanned(), 1);
  EXPECT_EQ(pool.peak_bytes(), 128);
}

TEST(MemoryPoolTest, WhatIsTooLargeForItsBufferIsNotOfThePlan) {
  MemoryPool pool(at::kCPU);
  pool.plan(plan_with_buffers({16}));
  EXPECT_EQ(pool.acquire(17, use(0)).memory.numel(), 17);
  EXPECT_EQ(pool.num_unplanned(), 1);
}

TEST(MemoryPoolTest, UnplannedMemoryIsLentAgainAndGivenUpForLarger) {
  MemoryPool pool(at::kCPU);
  pool.plan(plan_with_buffers({8}));
  pool.release(pool.acquire(8, use(0)));
  pool.release(pool.acquire(20));
  pool.release(pool.acquire(12));
  EXPECT_EQ(pool.num_allocations(), 2);
  EXPECT_EQ(pool.bytes(), 28);
  pool.release(pool.acquire(30));
  EXPECT_EQ(pool.bytes(), 38);  // of the plan, and the largest
  EXPECT_EQ(pool.num_unplanned(), 2);
}

TEST(MemoryPoolTest, WhatAStepHasNotUsedIsGivenUp) {
  MemoryPool pool(at::kCPU);
  pool.plan(plan_with_buffers({8}));
  pool.release(pool.acquire(8, use(0)));
  Buffer small = pool.acquire(12);
  pool.release(pool.acquire(20));
  pool.release(std::move(small));
  pool.give_up_unused();
  EXPECT_EQ(pool.bytes(), 40) << "lent in this step";
  pool.release(pool.acquire(12));
  pool.give_up_unused();
  EXPECT_EQ(pool.bytes(), 20);
  const Buffer lent = pool.acquire(12);
  pool.give_up_unused();
  pool.give_up_unused();
  EXPECT_EQ(pool.bytes(), 20) << "lent still";
  EXPECT_EQ(pool.num_unplanned(), 2);
}

TEST(MemoryPoolTest, APlanTakesThePlaceOfAnother) {
  MemoryPool pool(at::kCPU);
  pool.plan(plan_with_buffers({8, 16}));
  pool.release(pool.acquire(16, use(1)));
  pool.plan(plan_with_buffers({32}));
  EXPECT_EQ(pool.bytes(), 0);
  EXPECT_EQ(pool.acquire(32, use(0)).memory.numel(), 32);
  EXPECT_EQ(pool.peak_bytes(), 32);
  EXPECT_EQ(pool.num_unplanned(), 0);
}

TEST(MemoryPoolTest, WhatIsLentIsOfNoLaterPlan) {
  MemoryPool pool(at::kCPU);
  pool.plan(plan_with_buffers({8, 16}));
  Buffer lent = pool.acquire(16, use(1));  // in no step
  pool.plan(plan_with_buffers({16, 16}));
  const Buffer first = pool.acquire(16, use(0));
  pool.release(std::move(lent));
  EXPECT_EQ(pool.bytes(), 32);
  const Buffer second = pool.acquire(16, use(1));  // its own is not made yet
  EXPECT_EQ(pool.bytes(), 48);
  pool.give_up_unused();
  pool.give_up_unused();
  EXPECT_EQ(pool.bytes(), 32);
}

TEST(MemoryPoolTest, WhatIsLentSinceAnEarlierStepIsThePlansWhenItComesBack) {
  MemoryPool pool(at::kCPU);
  pool.plan(plan_with_buffers({8, 16, 32}));
  pool.set_recording(true);
  Buffer same = pool.acquire(16, use(1));
  Buffer other = pool.acquire(32, use(2));
  const void* const memory = same.memory.data_ptr();
  pool.end_step();
  pool.plan(plan_with_buffers({8, 16, 24}));
  const Buffer beside = pool.acquire(4);
  const Buffer none_is_free = pool.acquire(4);  // what is lent is no room
  EXPECT_EQ(pool.num_unplanned(), 1);
  pool.release(std::move(same));
  EXPECT_EQ(pool.acquire(16, use(1)).memory.data_ptr(), memory);
  pool.release(std::move(other));  // of another size
  EXPECT_EQ(pool.acquire(24, use(2)).memory.numel(), 24);
}

TEST(MemoryPoolTest, WhatIsFreeIsGivenUpForAPlan) {
  MemoryPool pool(at::kCPU);
  pool.release(pool.acquire(20));
  const Buffer lent = pool.acquire(20);
  const Buffer other = pool.acquire(5);
  pool.release(other);
  pool.plan(plan_with_buffers({8}));
  EXPECT_EQ(pool.bytes(), 20);
  pool.release(lent);
  EXPECT_EQ(pool.acquire(20).memory.data_ptr(), lent.memory.data_ptr());
}

TEST(MemoryPoolTest, WhatHasTheSizeOfAPlannedBufferIsKeptForIt) {
  MemoryPool pool(at::kCPU);
  pool.plan(plan_with_buffers({8, 16}));
  Buffer planned = pool.acquire(16, use(1));
  Buffer beside = pool.acquire(20);
  const void* const of_plan = planned.memory.data_ptr();
  const void* const of_none = beside.memory.data_ptr();
  pool.release(std::move(planned));
  pool.release(std::move(beside));
  pool.plan(plan_with_buffers({20, 16, 8}));
  EXPECT_EQ(pool.bytes(), 36);
  EXPECT_EQ(pool.acquire(20, use(0)).memory.data_ptr(), of_none);
  EXPECT_EQ(pool.acquire(16, use(1)).memory.data_ptr(), of_plan);
  EXPECT_EQ(pool.num_allocations(), 2);
}

TEST(MemoryPoolTest, AUseThatComesAgainHasABufferOfItsOwn) {
  MemoryPool pool(at::kCPU);
  pool.set_recording(true);
  UseRecord record;
  record.begin(use(0), 8);
  record.begin(use(0), 16);
  pool.plan(*MemoryPlan::create(record.end_step()));
  for (int step = 0; step < 2; ++step) {
    Buffer first = pool.acquire(8, use(0));
    EXPECT_EQ(first.memory.numel(), 8);
    pool.release(std::move(first));
    for (int time = 0; time < 2; ++time) {  // the last one's, if there are more
      Buffer later = pool.acquire(8, use(0));
      EXPECT_EQ(later.memory.numel(), 16);
      pool.release(std::move(later));
    }
    pool.end_step();
  }
}

TEST(MemoryPoolTest, RecordsWhatAStepUsesAndWhetherThePlanWasEnough) {
  MemoryPool pool(at::kCPU);
  pool.plan(plan_with_buffers({8}));
  const auto run = [&] {
    pool.release(pool.acquire(24, use(1)));
    pool.set_recording(true);
    Buffer first = pool.acquire(8, use(0));
    pool.set_recording(false);
    pool.release(pool.acquire(24, use(1)));
    pool.set_recording(true);
    Buffer second = pool.acquire(4, use(1));
    pool.end_use(*std::exchange(second.use, {}));  // its memory comes later
    pool.release(std::move(first));
    pool.set_recording(false);
    return second;
  };
  const Buffer kept = run();
  const RecordedStep step = pool.end_step();
  EXPECT_FALSE(step.is_as_planned);
  ASSERT_EQ(step.uses.size(), 2);
  EXPECT_EQ(step.uses[0],
            (RecordedUse{.use = use(0),
                         .interval = {.begin = 0, .end = 3, .bytes = 8}}));
  EXPECT_EQ(step.uses[1],
            (RecordedUse{.use = use(1),
                         .interval = {.begin = 1, .end = 2, .bytes = 4}}));
  pool.plan(*MemoryPlan::create(step.uses));
  pool.release(run());
  const RecordedStep again = pool.end_step();
  EXPECT_TRUE(again.is_as_planned);
  EXPECT_EQ(again.uses, step.uses);
}

// That of a peer which was too late to be waited for.
TEST(MemoryPoolTest, MemoryThatComesLateIsNoOtherStep) {
  MemoryPool pool(at::kCPU);
  pool.plan(plan_with_buffers({8}));
  pool.set_recording(true);
  Buffer late = pool.acquire(8, use(0));
  pool.end_use(*std::exchange(late.use, {}));
  pool.release(pool.acquire(8, use(0)));
  EXPECT_EQ(pool.num_unplanned(), 1);
  EXPECT_TRUE(pool.end_step().is_as_planned);
  pool.release(std::move(late));
}

}  // namespace
}  // namespace brigade
