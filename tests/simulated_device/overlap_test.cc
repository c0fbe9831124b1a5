// Backward overlaps with its collectives, for any implementation of a backend's
// futures.

#include <torch/torch.h>

#include <chrono>
#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "brigade/comm/streams/streams.h"
#include "brigade/comm_hooks/comm_hooks.h"
#include "brigade/comm_hooks/hook_traits.h"
#include "brigade/reducer/reducer.h"
#include "brigade/tests/support/identical_ranks_backend.h"
#include "brigade/tests/support/simulated_device/stream_test.h"
#include "gtest/gtest.h"

namespace brigade {
namespace overlap_test {

using simulated::on_device;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Tensors = std::vector<at::Tensor>;
using Hook = std::shared_ptr<c10d::CommHookInterface>;

constexpr int kWorldSize = 2;

// Work whose getFuture() makes the current stream wait, as in torch 2.15's NCCL
// backend.
class WaitingWork final : public c10d::Work {
 public:
  WaitingWork(Tensors outputs, c10::Event done)
      : outputs_(std::move(outputs)), done_(std::move(done)) {}

  bool wait(std::chrono::milliseconds /*timeout*/) override {
    const c10::Device device = outputs_.front().device();
    done_.block(simulated::current_stream_of(device.index()));
    return true;
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    wait(kNoTimeout);
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()),
        std::vector<c10::Device>{outputs_.front().device()});
    future->markCompleted(c10::IValue(outputs_));
    return future;
  }

 private:
  const Tensors outputs_;
  c10::Event done_;
};

class WaitingBackend final : public IdenticalRanksBackend {
 public:
  WaitingBackend() : IdenticalRanksBackend(0, kWorldSize) {}

 protected:
  c10::intrusive_ptr<c10d::Work> launch(
      CollectiveCall collective, std::function<void()> compute) override {
    const auto device = accelerator_of(collective);
    if (!device) {
      return IdenticalRanksBackend::launch(std::move(collective),
                                           std::move(compute));
    }
    c10::Event done(device->type());
    streams_.run(CommunicationStreams::record_launch(*device),
                 collective.outputs, [&] {
                   const at::AutoDispatchBelowADInplaceOrView below_autograd;
                   compute();
                   done.record(simulated::current_stream_of(device->index()));
                 });
    return c10::make_intrusive<WaitingWork>(collective.outputs,
                                            std::move(done));
  }

 private:
  CommunicationStreams streams_;
};

Group group_of_waiting_backend() {
  // No store: there are no peers for statuses.
  auto group = c10::make_intrusive<c10d::ProcessGroup>(0, kWorldSize);
  const c10::intrusive_ptr<c10d::Backend> backend =
      c10::make_intrusive<WaitingBackend>();
  for (const c10::DeviceType type : {at::kCPU, at::kPrivateUse1}) {
    group->setBackend(type, c10d::ProcessGroup::BackendType::CUSTOM, backend);
  }
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  return group;
}

// Backward of a product computes the gradient of the last factor first.
class OverlapTest : public simulated::StreamTest {
 protected:
  // Returns true if backward continued during the first bucket's collective. A
  // read of the bucket is then a race, unless backward's stream has waited.
  bool overlaps_with(const Hook& hook) {
    ReducerOptions options;
    options.bucket_cap_bytes = {64};
    options.comm_hook = hook;
    Reducer reducer(factors_, group_, std::move(options));
    constexpr int kNumSteps = 4;
    for (int step = 0; step < kNumSteps; ++step) {
      at::Tensor product = at::ones({16}, on_device());
      for (const at::Tensor& factor : factors_) product = product * factor;
      const bool reads = step == kNumSteps - 1;
      if (reads) simulated::expect_no_races();
      const auto reading =
          factors_.front().register_hook([&](const at::Tensor& /*gradient*/) {
            if (reads) factors_.back().grad().sum();
          });
      const at::Tensor loss = product.sum();
      reducer.prepare_for_backward(loss);
      loss.backward();
      factors_.front().remove_hook(reading);
    }
    return !simulated::take_races().empty();
  }

  Tensors make_factors() const {
    Tensors factors;
    for (int i = 0; i < 3; ++i) {
      factors.push_back(at::ones({16}, on_device()).requires_grad_());
    }
    return factors;
  }

  const Group group_ = group_of_waiting_backend();
  const Tensors factors_ = make_factors();
};

TEST_F(OverlapTest, BucketsOverlap) { EXPECT_TRUE(overlaps_with(nullptr)); }

TEST_F(OverlapTest, AHookThatCallsGetFutureDoesNotOverlap) {
  const Group group = group_;
  EXPECT_FALSE(overlaps_with(make_comm_hook([group](c10d::GradBucket& bucket) {
    Tensors tensors = {bucket.getBuffer()};
    return group->allreduce(tensors)->getFuture();
  })));
}

TEST_F(OverlapTest, AHookThatCallsFutureOfOverlaps) {
  const Group group = group_;
  EXPECT_TRUE(overlaps_with(make_comm_hook([group](c10d::GradBucket& bucket) {
    Tensors tensors = {bucket.getBuffer()};
    return future_of(group->allreduce(tensors), tensors.front());
  })));
}

TEST_F(OverlapTest, GradientsAreReadAfterTheirReduction) {
  Reducer reducer(factors_, group_, {.find_unused_parameters = true});
  for (int step = 0; step < 3; ++step) {
    at::Tensor product = at::ones({16}, on_device());
    for (const at::Tensor& factor : factors_) product = product * factor;
    const at::Tensor loss = product.sum();
    reducer.prepare_for_backward(loss);
    loss.backward();
    for (const at::Tensor& factor : factors_) {
      EXPECT_EQ(factor.grad().sum().item<double>(), 16);
      at::Tensor(factor).mutable_grad().reset();
    }
  }
}

}  // namespace overlap_test
}  // namespace brigade
