// Process groups of devices that brigade knows nothing of: the caller makes the
// backend.

#include <torch/torch.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "brigade/comm/identical_ranks_backend.h"
#include "brigade/comm/process_group.h"
#include "brigade/comm/subgroup.h"
#include "brigade/reducer/reducer.h"
#include "brigade/tests/simulated_device/host_backend.h"
#include "brigade/tests/support/simulated_device/stream_test.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using simulated::on_device;
using ::testing::HasSubstr;
using testing::run_ranks_on_devices;
using ::testing::ThrowsMessage;
using testing::with_host_backend;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Tensors = std::vector<at::Tensor>;

double summed(const Group& group, const at::Tensor& tensor) {
  Tensors tensors = {tensor};
  group->allreduce(tensors)->wait();
  return tensors[0].sum().item<double>();
}

class VendorBackendTest : public simulated::StreamTest {};

TEST_F(VendorBackendTest, ServesItsDevicesAndGlooTheCpu) {
  run_ranks_on_devices(2, [](const Group& group, int rank) {
    EXPECT_EQ(summed(group, at::ones({4}, on_device(at::kFloat, rank))), 8);
    EXPECT_EQ(summed(group, at::ones({4})), 8);
    EXPECT_EQ(group->getBackend(at::kPrivateUse1)->getBackendName(), "host");
    EXPECT_EQ(group->getBackend(at::kCPU)->getBackendName(), "gloo");
  });
}

TEST_F(VendorBackendTest, GroupsOfSomeRanksHaveTheirOwn) {
  run_ranks_on_devices(2, [](const Group& group, int rank) {
    const c10::Device device = simulated::device(rank);
    const GroupScope both = make_subgroup(group, {0, 1}, device);
    EXPECT_EQ(summed(both.group(), at::ones({2}, on_device(at::kFloat, rank))),
              4);
    const GroupScope on_cpu = make_subgroup(group, {0, 1});
    EXPECT_EQ(summed(on_cpu.group(), at::ones({2})), 4);
  });
}

TEST_F(VendorBackendTest, ReducesGradients) {
  run_ranks_on_devices(2, [](const Group& group, int rank) {
    const Tensors parameters = {
        at::ones({3}, on_device(at::kFloat, rank)).requires_grad_(),
        at::ones({5}, on_device(at::kFloat, rank)).requires_grad_()};
    Reducer reducer(parameters, group);
    for (int step = 1; step <= 3; ++step) {
      const at::Tensor loss =
          (parameters[0].sum() + 2 * parameters[1].sum()) * step * (rank + 1);
      reducer.prepare_for_backward(loss);
      loss.backward();
      for (size_t i = 0; i < parameters.size(); ++i) {
        at::Tensor& gradient = parameters[i].mutable_grad();
        const double mean = 1.5 * step * static_cast<double>(i + 1);
        EXPECT_EQ(gradient.sum().item<double>(),
                  mean * static_cast<double>(gradient.numel()));
        gradient.reset();
      }
    }
  });
}

TEST_F(VendorBackendTest, AWorldOfOneNeedsNone) {
  const c10::DeviceGuard back_to_this_one(simulated::device());
  const Group group = init_process_group(LaunchEnvironment{.local_rank = 1},
                                         with_host_backend());
  EXPECT_EQ(at::ones({1}, at::TensorOptions("privateuseone")).device().index(),
            1);
  EXPECT_EQ(summed(group, at::ones({4}, on_device(at::kFloat, 1))), 4);
}

TEST_F(VendorBackendTest, WhatDoesNotFitIsRefused) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  ProcessGroupOptions options = with_host_backend();
  options.make_backend = [](const BackendPlace&) {
    return c10::make_intrusive<IdenticalRanksBackend>(1, 2);
  };
  EXPECT_THAT([&] { make_process_group(store, 0, 1, options); },
              ThrowsMessage<c10::ValueError>(HasSubstr(
                  "a backend of rank 0 of 1, found one of rank 1 of 2")));
  options.make_backend = [](const BackendPlace&) { return nullptr; };
  EXPECT_THAT([&] { make_process_group(store, 0, 1, options); },
              ThrowsMessage<c10::ValueError>(HasSubstr("found none")));
  EXPECT_THAT(
      [&] {
        init_process_group(LaunchEnvironment{.local_rank = 99},
                           with_host_backend());
      },
      ThrowsMessage<c10::ValueError>(HasSubstr("local rank 99 needs")));
  options.device_type = at::kCPU;
  EXPECT_THAT([&] { make_process_group(store, 0, 1, options); },
              ThrowsMessage<c10::ValueError>(HasSubstr("Set device_type")));
  options.device_type = at::kXPU;
  EXPECT_THAT([&] { init_process_group(LaunchEnvironment{}, options); },
              ThrowsMessage<c10::ValueError>(HasSubstr("xpu")));
}

}  // namespace
}  // namespace brigade
