// The groups of one process, where collectives have a stream of their own.

#include <torch/torch.h>

#include <vector>

#include "brigade/comm/process_group.h"
#include "brigade/tests/support/recording_group.h"
#include "brigade/tests/support/simulated_device/stream_test.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using simulated::make_wait;
using simulated::on_device;
using simulated::Race;
using simulated::take_races;
using Tensors = std::vector<at::Tensor>;

class GroupStreamTest : public simulated::StreamTest {
 protected:
  // Launches a sum of ones.
  c10::intrusive_ptr<c10d::Work> launch() {
    tensors_ = {at::ones({4}, on_device())};
    return recording_.group()->allreduce(tensors_);
  }

  RecordingGroup recording_{/*world_size=*/4};
  Tensors tensors_;
};

TEST_F(GroupStreamTest, AWorkIsWaitedForByTheCurrentStream) {
  launch()->wait();
  EXPECT_EQ(tensors_[0].sum().item<double>(), 16);
}

TEST_F(GroupStreamTest, AFutureIsWaitedForByTheCurrentStream) {
  launch()->getFuture()->waitAndThrow();
  EXPECT_EQ(tensors_[0].sum().item<double>(), 16);
}

TEST_F(GroupStreamTest, AResultThatNobodyWaitedForIsARace) {
  launch();
  tensors_[0].sum().item<double>();
  EXPECT_FALSE(take_races().empty());
}

TEST_F(GroupStreamTest, ACollectiveIsBehindTheStreamThatLaunchedIt) {
  const c10::Stream side = simulated::new_stream();
  make_wait(side, simulated::default_stream());
  {
    const c10::StreamGuard on_side(side);
    launch()->wait();
  }
  make_wait(simulated::default_stream(), side);
  EXPECT_EQ(tensors_[0].sum().item<double>(), 16);
  tensors_[0].record_stream(simulated::default_stream());
}

TEST_F(GroupStreamTest, ACollectiveLaunchedFromAnUnorderedStreamIsARace) {
  tensors_ = {at::ones({4}, on_device())};
  {
    const c10::StreamGuard on_side(simulated::new_stream());
    recording_.group()->allreduce(tensors_);
  }
  EXPECT_FALSE(take_races().empty());
}

TEST_F(GroupStreamTest, AHeldCollectiveIsBehindItsLaunchToo) {
  recording_.hold();
  const auto work = launch();
  recording_.complete(0);
  work->wait();
  EXPECT_EQ(tensors_[0].sum().item<double>(), 16);
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

TEST_F(GroupStreamTest, AGroupOfOneServesAnyDevice) {
  Tensors tensors = {at::ones({4}, on_device())};
  single_process_group()->allreduce(tensors)->wait();
  EXPECT_EQ(tensors[0].sum().item<double>(), 4);
}

}  // namespace
}  // namespace brigade
