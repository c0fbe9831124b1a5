#include "brigade/fsdp/memory/memory_pool.h"

#include <utility>

#include "gtest/gtest.h"

namespace brigade {
namespace {

TEST(MemoryPoolTest, APlannedBufferIsMadeWhenItIsFirstUsedAndLentAgain) {
  MemoryPool pool(at::kCPU);
  pool.plan({64, 16});
  EXPECT_EQ(pool.bytes(), 0);
  Buffer buffer = pool.acquire(8, 0);
  const void* const memory = buffer.memory.data_ptr();
  EXPECT_EQ(buffer.memory.numel(), 64);
  pool.release(std::move(buffer));
  EXPECT_EQ(pool.acquire(60, 0).memory.data_ptr(), memory);
  EXPECT_EQ(pool.acquire(16, 1).memory.numel(), 16);
  EXPECT_EQ(pool.num_allocations(), 2);
  EXPECT_EQ(pool.num_unplanned(), 0);
  EXPECT_EQ(pool.peak_bytes(), 80);
}

TEST(MemoryPoolTest, WhoFindsItsBufferLentTakesTheSmallestThatFits) {
  MemoryPool pool(at::kCPU);
  pool.plan({64, 32, 16});
  const Buffer own = pool.acquire(16, 2);
  EXPECT_EQ(pool.acquire(16, 2).memory.numel(), 32);
  EXPECT_EQ(pool.acquire(16).memory.numel(), 64);
  EXPECT_EQ(pool.num_unplanned(), 0);
  EXPECT_EQ(pool.acquire(16, 2).memory.numel(), 16);
  EXPECT_EQ(pool.num_unplanned(), 1);
  EXPECT_EQ(pool.peak_bytes(), 128);
}

TEST(MemoryPoolTest, WhatIsTooLargeForItsBufferIsNotOfThePlan) {
  MemoryPool pool(at::kCPU);
  pool.plan({16});
  EXPECT_EQ(pool.acquire(17, 0).memory.numel(), 17);
  EXPECT_EQ(pool.num_unplanned(), 1);
}

TEST(MemoryPoolTest, UnplannedMemoryIsLentAgainAndGivenUpForLarger) {
  MemoryPool pool(at::kCPU);
  pool.plan({8});
  pool.release(pool.acquire(8, 0));
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
  pool.plan({8});
  pool.release(pool.acquire(8, 0));
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
  pool.plan({8, 16});
  Buffer buffer = pool.acquire(16, 1);
  EXPECT_TRUE(pool.lends_planned());
  pool.release(std::move(buffer));
  EXPECT_FALSE(pool.lends_planned());
  pool.plan({32});
  EXPECT_EQ(pool.bytes(), 0);
  EXPECT_EQ(pool.acquire(32, 0).memory.numel(), 32);
  EXPECT_EQ(pool.peak_bytes(), 32);
  EXPECT_EQ(pool.num_unplanned(), 0);
}

TEST(MemoryPoolTest, WhatIsFreeIsGivenUpForAPlan) {
  MemoryPool pool(at::kCPU);
  pool.release(pool.acquire(20));
  const Buffer lent = pool.acquire(20);
  const Buffer other = pool.acquire(5);
  pool.release(other);
  pool.plan({8});
  EXPECT_EQ(pool.bytes(), 20);
  pool.release(lent);
  EXPECT_EQ(pool.acquire(20).memory.data_ptr(), lent.memory.data_ptr());
}

}  // namespace
}  // namespace brigade
