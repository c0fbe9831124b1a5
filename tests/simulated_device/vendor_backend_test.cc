// Process groups of devices that brigade knows nothing of: the caller makes the
// backend.

#include <torch/torch.h>

#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/comm/gloo_backend.h"
#include "brigade/comm/identical_ranks_backend.h"
#include "brigade/comm/process_group.h"
#include "brigade/comm/subgroup.h"
#include "brigade/reducer/reducer.h"
#include "brigade/tests/support/simulated_device/stream_test.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using simulated::on_device;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Tensors = std::vector<at::Tensor>;

// As a vendor's: sums on the host.
class HostBackend final : public c10d::Backend {
 public:
  explicit HostBackend(const BackendPlace& place)
      : c10d::Backend(place.rank, place.world_size),
        timeout_(place.timeout),
        gloo_(make_gloo_backend(place.store, place.rank, place.world_size,
                                place.timeout, {"lo"})) {}

  const std::string getBackendName() const override { return "host"; }

  c10::intrusive_ptr<c10d::Work> allreduce(
      Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return on_host(tensors, [&](Tensors& copies) {
      return gloo_->allreduce(copies, options);
    });
  }

  c10::intrusive_ptr<c10d::Work> broadcast(
      Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return on_host(tensors, [&](Tensors& copies) {
      return gloo_->broadcast(copies, options);
    });
  }

 private:
  template <typename Launch>
  c10::intrusive_ptr<c10d::Work> on_host(Tensors& tensors,
                                         const Launch& launch) {
    auto work = c10::make_intrusive<AnsweredWork>(
        getRank(), CollectiveCall{.inputs = tensors, .outputs = tensors},
        timeout_);
    work->answer([&] {
      Tensors copies;
      for (const at::Tensor& tensor : tensors) copies.push_back(tensor.cpu());
      launch(copies)->wait();
      for (size_t i = 0; i < tensors.size(); ++i) tensors[i].copy_(copies[i]);
    });
    return work;
  }

  const std::chrono::milliseconds timeout_;
  const c10::intrusive_ptr<c10d::Backend> gloo_;
};

ProcessGroupOptions with_host_backend() {
  return {.device_type = at::kPrivateUse1,
          .make_backend =
              [](const BackendPlace& place) {
                return c10::make_intrusive<HostBackend>(place);
              },
          .gloo_interfaces = {"lo"}};
}

double summed(const Group& group, const at::Tensor& tensor) {
  Tensors tensors = {tensor};
  group->allreduce(tensors)->wait();
  return tensors[0].sum().item<double>();
}

class VendorBackendTest : public simulated::StreamTest {
 protected:
  // One rank for each thread, on a device of its own.
  template <typename Train>
  void run_ranks(const Train& train) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < 2; ++rank) {
      threads.emplace_back([&, rank] {
        const GroupScope scope(
            make_process_group(store, rank, 2, with_host_backend()));
        train(scope.group(), rank);
      });
    }
  }
};

TEST_F(VendorBackendTest, ServesItsDevicesAndGlooTheCpu) {
  run_ranks([](const Group& group, int rank) {
    EXPECT_EQ(summed(group, at::ones({4}, on_device(at::kFloat, rank))), 8);
    EXPECT_EQ(summed(group, at::ones({4})), 8);
    EXPECT_EQ(group->getBackend(at::kPrivateUse1)->getBackendName(), "host");
    EXPECT_EQ(group->getBackend(at::kCPU)->getBackendName(), "gloo");
  });
}

TEST_F(VendorBackendTest, GroupsOfSomeRanksHaveTheirOwn) {
  run_ranks([](const Group& group, int rank) {
    const c10::Device device = simulated::device(rank);
    const GroupScope both = make_subgroup(group, {0, 1}, device);
    EXPECT_EQ(summed(both.group(), at::ones({2}, on_device(at::kFloat, rank))),
              4);
    const GroupScope on_cpu = make_subgroup(group, {0, 1});
    EXPECT_EQ(summed(on_cpu.group(), at::ones({2})), 4);
  });
}

TEST_F(VendorBackendTest, ReducesGradients) {
  run_ranks([](const Group& group, int rank) {
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
  options.make_backend = [](BackendPlace place) {
    place.world_size = 1;
    place.rank = 0;
    return c10::make_intrusive<HostBackend>(place);
  };
  EXPECT_THAT([&] { make_process_group(store, 1, 2, options); },
              ThrowsMessage<c10::ValueError>(HasSubstr(
                  "a backend of rank 1 of 2, found one of rank 0 of 1")));
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
