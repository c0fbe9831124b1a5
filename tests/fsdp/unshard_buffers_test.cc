#include "brigade/fsdp/unshard_buffers.h"

#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace brigade {
namespace unshard_buffers_test {

TEST(UnshardBuffersTest, TakeTheBestFitOrReplaceTheLargest) {
  UnshardBuffers buffers(at::kCPU);
  std::vector<Lease> leases;
  for (const int64_t bytes : {64, 16, 32}) {
    leases.push_back(buffers.acquire(bytes));
  }
  for (Lease& lease : leases) buffers.release(std::move(lease));
  EXPECT_EQ(buffers.total_bytes(), 112);
  const Lease first = buffers.acquire(20);
  const Lease second = buffers.acquire(20);
  EXPECT_EQ(first.bytes.numel(), 32);
  EXPECT_EQ(second.bytes.numel(), 64);
  const Lease third = buffers.acquire(20);  // replaces the buffer of 16 bytes
  EXPECT_EQ(third.bytes.numel(), 20);
  EXPECT_EQ(buffers.total_bytes(), 116);
  const Lease fourth = buffers.acquire(8);
  EXPECT_EQ(buffers.total_bytes(), 124);
  EXPECT_EQ(buffers.peak_bytes(), 124);
}

TEST(UnshardBuffersTest, RepeatedRequestsAllocateNothing) {
  UnshardBuffers buffers(at::kCPU);
  std::vector<int64_t> totals;
  for (int step = 0; step < 4; ++step) {
    Lease held;
    for (const int64_t bytes : {10, 50, 20, 40, 30, 60}) {
      Lease next = buffers.acquire(bytes);
      buffers.release(std::exchange(held, std::move(next)));
    }
    buffers.release(std::move(held));
    totals.push_back(buffers.total_bytes());
  }
  EXPECT_EQ(totals[3], totals[1]);
  EXPECT_LE(buffers.peak_bytes(), 110);
}

TEST(UnshardBuffersTest, ShrinkKeepsBuffersInUse) {
  UnshardBuffers buffers(at::kCPU);
  Lease in_use = buffers.acquire(10);
  Lease first = buffers.acquire(20);
  Lease last = buffers.acquire(30);
  buffers.release(std::move(first));
  buffers.release(std::move(last));
  buffers.shrink_to(35);
  EXPECT_EQ(buffers.total_bytes(), 30);
  buffers.shrink_to(0);
  EXPECT_EQ(buffers.total_bytes(), 10);
  EXPECT_EQ(buffers.peak_bytes(), 60);
}

}  // namespace unshard_buffers_test
}  // namespace brigade
