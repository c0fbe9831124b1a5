// The simulated device: results, memory, races and process groups.

#include <torch/torch.h>

#include <thread>
#include <vector>

#include "brigade/tests/support/recording_group.h"
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

// Does not block the host.
at::Tensor count_to(int64_t numel) { return at::arange(numel, on_device()); }

TEST_F(DeviceTest, ResultsAreThoseOfTheCpu) {
  const at::Tensor x = count_to(6).view({2, 3});
  const at::Tensor y = at::softmax(x.t().matmul(x), 1) + 1;
  const at::Tensor z = x.cpu();
  EXPECT_TRUE(at::equal(y.cpu(), at::softmax(z.t().matmul(z), 1) + 1));
  EXPECT_EQ(y.device(), device());
}

TEST_F(DeviceTest, AHostReadOfDeviceMemoryCrashes) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const at::Tensor x = count_to(4);
  EXPECT_DEATH(
      {
        volatile const float value = *x.const_data_ptr<float>();
        (void)value;
      },
      "");
}

TEST_F(DeviceTest, FreedMemoryReturnsToItsStream) {
  at::Tensor x = count_to(300);
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
  at::Tensor x = count_to(700);
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

TEST_F(DeviceTest, ACopyToPinnedMemoryIsCompleteAfterTheHostWaits) {
  const at::Tensor x = count_to(4);
  const at::Tensor host =
      at::empty({4}, at::TensorOptions(at::kFloat).pinned_memory(true));
  ASSERT_TRUE(host.is_pinned());
  host.copy_(x, /*non_blocking=*/true);
  EXPECT_NE(host[3].item<double>(), 3);
  default_stream().synchronize();
  EXPECT_EQ(host[3].item<double>(), 3);
}

TEST_F(DeviceTest, AHostWriteToTheSourceOfACopyIsARace) {
  at::Tensor host = at::ones({4}, at::TensorOptions(at::kFloat)).pin_memory();
  const at::Tensor x = host.to(device(), /*non_blocking=*/true);
  host.zero_();
  expect_race(Race::kHostWrite);
}

TEST_F(DeviceTest, ADroppedWaitIsARace) {
  const at::Tensor x = count_to(4);
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

// ---- Process groups whose collectives have their own stream.

class GroupStreamTest : public StreamTest {
 protected:
  // Launches a sum of ones.
  c10::intrusive_ptr<c10d::Work> launch() {
    tensors_ = {at::ones({4}, on_device())};
    return recording_.group()->allreduce(tensors_);
  }

  RecordingGroup recording_{/*world_size=*/4};
  std::vector<at::Tensor> tensors_;
};

TEST_F(GroupStreamTest, TheCurrentStreamWaitsForAWork) {
  launch()->wait();
  EXPECT_EQ(tensors_[0].sum().item<double>(), 16);
}

TEST_F(GroupStreamTest, AResultReadWithoutAWaitIsARace) {
  launch();
  tensors_[0].sum().item<double>();
  EXPECT_FALSE(take_races().empty());
}

TEST_F(GroupStreamTest, ACollectiveLaunchedFromAnUnorderedStreamIsARace) {
  tensors_ = {at::ones({4}, on_device())};
  {
    const c10::StreamGuard on_side(new_stream());
    recording_.group()->allreduce(tensors_);
  }
  EXPECT_FALSE(take_races().empty());
}

TEST_F(GroupStreamTest, CallbacksUseTheFuturesValue) {
  const auto doubled = launch()->getFuture()->then(
      [](c10::ivalue::Future& sum) {
        return c10::IValue(sum.value().toTensorVector()[0] * 2);
      },
      c10::TensorType::get());
  doubled->waitAndThrow();
  EXPECT_EQ(doubled->value().toTensor().sum().item<double>(), 32);
}

}  // namespace
}  // namespace brigade::simulated
