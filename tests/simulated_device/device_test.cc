// The device itself: what it computes, and the races that it finds.

#include <torch/torch.h>

#include <thread>
#include <vector>

#include "brigade/tests/support/simulated_device/ordering_calls.h"
#include "brigade/tests/support/simulated_device/simulation.h"
#include "brigade/tests/support/simulated_device/stream_test.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade::simulated {
namespace {

using ::testing::HasSubstr;

class DeviceTest : public StreamTest {
 protected:
  void expect_race(Race::Kind kind) {
    const std::vector<Race> races = take_races();
    ASSERT_FALSE(races.empty());
    EXPECT_EQ(races[0].kind, kind) << races[0].text;
  }

  const c10::Stream side_ = new_stream();
};

// The host does not wait for it.
at::Tensor counted(int64_t numel) { return at::arange(numel, on_device()); }

TEST_F(DeviceTest, ComputesWhatTheCpuDoes) {
  const at::Tensor x = counted(6).view({2, 3});
  const at::Tensor y = at::softmax(x.t().matmul(x), 1) + 1;
  const at::Tensor z = x.cpu();
  EXPECT_TRUE(at::equal(y.cpu(), at::softmax(z.t().matmul(z), 1) + 1));
  EXPECT_EQ(y.device(), device());
}

TEST_F(DeviceTest, GivesOutputsTheirSizes) {
  at::Tensor out = at::empty({0}, on_device());
  at::add_out(out, counted(4), counted(4));
  EXPECT_EQ(out.sum().item<double>(), 12);
}

TEST_F(DeviceTest, ResizesInItsOwnMemory) {
  at::Tensor x = counted(3);
  x.resize_({1000});
  EXPECT_TRUE(at::equal(x.narrow(0, 0, 3).cpu(), counted(3).cpu()));
}

TEST_F(DeviceTest, TrainsAModule) {
  const at::Tensor w = at::arange(12.0).view({3, 4}) / 16;
  const at::Tensor x = at::arange(20.0).view({5, 4}) / 8 - 1;
  const auto gradient_on = [&](const c10::Device& where) {
    const at::Tensor p = w.detach().clone().to(where).requires_grad_();
    torch::mse_loss(torch::gelu(torch::linear(x.to(where), p)),
                    at::zeros({5, 3}, where))
        .backward();
    return p.grad().cpu();
  };
  EXPECT_TRUE(at::equal(gradient_on(device()), gradient_on(at::kCPU)));
}

TEST_F(DeviceTest, AHostsReadOfItsMemoryCrashes) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const at::Tensor x = counted(4);
  EXPECT_DEATH(
      {
        volatile const float value = *x.const_data_ptr<float>();
        (void)value;
      },
      "");
}

TEST_F(DeviceTest, AnEventOrders) {
  const at::Tensor x = counted(4);
  make_wait(side_, default_stream());
  {
    const c10::StreamGuard on_side(side_);
    EXPECT_EQ((x + 1).sum().item<double>(), 10);
  }
  make_wait(default_stream(), side_);
}

TEST_F(DeviceTest, FindsAFreeThatAnotherStreamIsNotBehind) {
  at::Tensor x = counted(4);
  make_wait(side_, default_stream());
  const c10::StreamGuard on_side(side_);
  const at::Tensor y = x + 1;
  x.reset();
  expect_race(Race::kEarlyFree);
}

TEST_F(DeviceTest, ARecordedStreamMayGoOnAfterAFree) {
  at::Tensor x = counted(4);
  make_wait(side_, default_stream());
  const c10::StreamGuard on_side(side_);
  const at::Tensor y = x + 1;
  x.record_stream(side_);
  x.reset();
}

TEST_F(DeviceTest, FreedMemoryGoesBackToItsStream) {
  at::Tensor x = counted(300);
  const void* const memory = x.const_data_ptr();
  const size_t bytes = x.nbytes();
  x.reset();
  {
    const c10::StreamGuard on_side(side_);
    EXPECT_NE(at::empty({static_cast<int64_t>(bytes)}, on_device(at::kByte))
                  .const_data_ptr(),
              memory);
  }
  EXPECT_EQ(at::empty({300}, on_device()).const_data_ptr(), memory);
}

TEST_F(DeviceTest, MemoryWithARecordedUseWaitsForIt) {
  at::Tensor x = counted(700);
  const void* const memory = x.const_data_ptr();
  make_wait(side_, default_stream());
  x.record_stream(side_);
  {
    const c10::StreamGuard on_side(side_);
    const at::Tensor y = x + 1;
  }
  x.reset();
  const at::Tensor other = at::empty({700}, on_device());
  EXPECT_NE(other.const_data_ptr(), memory);
  make_wait(default_stream(), side_);
  EXPECT_EQ(at::empty({700}, on_device()).const_data_ptr(), memory);
}

TEST_F(DeviceTest, FindsAUseOfFreedMemory) {
  at::Tensor x = counted(1000);
  const at::Tensor same = at::for_blob(x.mutable_data_ptr(), {1000})
                              .options(on_device())
                              .target_device(device())
                              .make_tensor();
  x.reset();
  same.sum().item<double>();
  expect_race(Race::kUseAfterFree);
}

TEST_F(DeviceTest, WhatACopyToPinnedMemoryBringsIsThereOnceTheHostHasWaited) {
  const at::Tensor x = counted(4);
  const at::Tensor host =
      at::empty({4}, at::TensorOptions(at::kFloat).pinned_memory(true));
  ASSERT_TRUE(host.is_pinned());
  host.copy_(x, /*non_blocking=*/true);
  EXPECT_NE(host[3].item<double>(), 3);
  default_stream().synchronize();
  EXPECT_EQ(host[3].item<double>(), 3);
}

TEST_F(DeviceTest, FindsAHostThatChangesWhatACopyStillReads) {
  at::Tensor host = at::ones({4}, at::TensorOptions(at::kFloat)).pin_memory();
  const at::Tensor x = host.to(device(), /*non_blocking=*/true);
  host.zero_();
  expect_race(Race::kHostWrite);
}

TEST_F(DeviceTest, PinnedMemoryIsHeldBackForCopies) {
  at::Tensor host = at::ones({4}).pin_memory();
  const void* const memory = host.const_data_ptr();
  const at::Tensor x = host.to(device(), /*non_blocking=*/true);
  host.reset();
  EXPECT_NE(at::ones({4}).pin_memory().const_data_ptr(), memory);
  synchronize_all();
}

TEST_F(DeviceTest, DevicesWaitForEachOtherInACopyOnly) {
  const at::Tensor x = counted(4);
  const at::Tensor there = x.to(device(1));
  EXPECT_TRUE(at::equal(there.cpu(), x.cpu()));
}

TEST_F(DeviceTest, AnEventIsDoneForWhoeverAsksAgainAndAgain) {
  const at::Tensor x = counted(4);
  c10::Event event(kDeviceType);
  event.record(default_stream());
  EXPECT_FALSE(event.query());
  while (!event.query()) {
  }
}

TEST_F(DeviceTest, BackwardsStreamsAreInOrder) {
  at::Tensor a = counted(4).requires_grad_();
  at::Tensor loss;
  make_wait(side_, default_stream());
  {
    const c10::StreamGuard on_side(side_);
    loss = (a * a).sum();
  }
  make_wait(default_stream(), side_);
  loss.backward();
  EXPECT_EQ(a.grad().sum().item<double>(), 12);
  loss.record_stream(default_stream());
}

TEST_F(DeviceTest, ADroppedWaitIsFound) {
  const at::Tensor x = counted(4);
  const DropCalls lost([&](const OrderingCall& call) {
    return call.kind == OrderingCall::kWait && call.stream == side_ &&
           call.other == default_stream();
  });
  make_wait(side_, default_stream());
  EXPECT_EQ(lost.num_dropped(), 1);
  {
    const c10::StreamGuard on_side(side_);
    (x + 1).sum().item<double>();
  }
  const std::vector<Race> races = take_races();
  ASSERT_FALSE(races.empty());
  EXPECT_EQ(races[0].kind, Race::kUnordered);
  EXPECT_THAT(races[0].text, HasSubstr("the default stream of sim:0"));
  EXPECT_THAT(races[0].text, HasSubstr("'aten::add.out'"));
}

}  // namespace
}  // namespace brigade::simulated
