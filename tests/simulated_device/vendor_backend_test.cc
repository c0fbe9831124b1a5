// Process groups whose backend the caller makes, for devices unknown to
// brigade.

#include <torch/torch.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>
#include <vector>

#include "brigade/comm/backends/device_backend.h"
#include "brigade/comm/group/group_info.h"
#include "brigade/comm/group/launch_environment.h"
#include "brigade/comm/process_group.h"
#include "brigade/fsdp/segmented_model.h"
#include "brigade/reducer/reducer.h"
#include "brigade/tests/simulated_device/host_backend.h"
#include "brigade/tests/support/identical_ranks_backend.h"
#include "brigade/tests/support/simulated_device/stream_test.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

namespace fs = std::filesystem;

using simulated::on_device;
using ::testing::HasSubstr;
using testing::run_ranks_on_devices;
using ::testing::ThrowsMessage;
using testing::with_host_backend;
using testing::without_cpu;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Tensors = std::vector<at::Tensor>;

double summed(const Group& group, const at::Tensor& tensor) {
  Tensors tensors = {tensor};
  group->allreduce(tensors)->wait();
  return tensors[0].sum().item<double>();
}

class VendorBackendTest : public simulated::StreamTest {};

TEST_F(VendorBackendTest, ServesDevicesWhileGlooServesTheCpu) {
  run_ranks_on_devices(2, [](const Group& group, int rank) {
    EXPECT_EQ(summed(group, at::ones({4}, on_device(at::kFloat, rank))), 8);
    EXPECT_EQ(summed(group, at::ones({4})), 8);
    EXPECT_EQ(group->getBackend(at::kPrivateUse1)->getBackendName(), "host");
    EXPECT_EQ(group->getBackend(at::kCPU)->getBackendName(), "gloo");
  });
}

TEST_F(VendorBackendTest, SubgroupsHaveTheirOwnBackend) {
  run_ranks_on_devices(2, [](const Group& group, int rank) {
    const c10::Device device = simulated::device(rank);
    const GroupScope both = make_subgroup(group, {0, 1}, device);
    EXPECT_EQ(summed(both.group(), at::ones({2}, on_device(at::kFloat, rank))),
              4);
    EXPECT_EQ(both.group()->getDeviceTypes().size(), 1);  // no Gloo
    const GroupScope on_cpu = make_subgroup(group, {0, 1});
    EXPECT_EQ(summed(on_cpu.group(), at::ones({2})), 4);
  });
}

void reduce_gradients(const Group& group, int rank) {
  const Tensors parameters = {
      at::ones({3}, on_device(at::kFloat, rank)).requires_grad_(),
      at::ones({5}, on_device(at::kFloat, rank)).requires_grad_()};
  Reducer reducer(parameters, group, {.find_unused_parameters = true});
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
}

TEST_F(VendorBackendTest, ReducesGradients) {
  run_ranks_on_devices(2, reduce_gradients);
  run_ranks_on_devices(2, [](const Group& group, int rank) {
    reduce_gradients(without_cpu(group), rank);
  });
}

std::unique_ptr<SegmentedModel> sharded_model(std::vector<UnitRequest> units,
                                              const Group& group) {
  return std::make_unique<SegmentedModel>(
      make_sharded_units(std::move(units), group, {}), group);
}

// Meshes of units and reports of written checkpoint files go through the
// devices. One parameter is not in C order.
TEST_F(VendorBackendTest, TrainsAndSavesWithoutACpuBackend) {
  const fs::path folder =
      fs::path(::testing::TempDir()) / c10::str("devices_alone_", getpid());
  fs::create_directories(folder);
  struct Training {
    Training(const Group& group, int rank, double value)
        : weights({at::full({2, 3}, value, on_device(at::kFloat, rank)).t(),
                   at::full({2}, value + rank, on_device(at::kFloat, rank))}),
          model(sharded_model(
              {{.name = "all", .parameters = {{"w", trained(weights[0])}}},
               {.name = "own",
                .parameters = {{c10::str("w", rank), trained(weights[1])}},
                .mesh = UnitMesh{.ranks = {rank}}}},
              group)),
          optimizer(weights, 0.5) {}
    static at::Tensor trained(at::Tensor& weight) {
      return weight.requires_grad_();
    }
    at::Tensor shard(size_t i) const {
      return shard_of(weights[i])->local.cpu();
    }

    Tensors weights;
    std::unique_ptr<SegmentedModel> model;
    torch::optim::Adagrad optimizer;
  };
  run_ranks_on_devices(2, [&](const Group& with_cpu, int rank) {
    const Group group = without_cpu(with_cpu);
    Training saved(group, rank, 3);
    const auto step = [rank](Training& training) {
      training.optimizer.zero_grad();
      const Tensors& weights = training.weights;
      training.model
          ->forward([&] {
            return (weights[0] * (rank + 1)).sum() + weights[1].sum();
          })
          .backward();
      training.optimizer.step();
    };
    step(saved);
    EXPECT_TRUE(at::equal(saved.shard(0), at::full_like(saved.shard(0), 2.5)));
    for (const char* name : {"shards", "whole.safetensors"}) {
      save_checkpoint(folder / name, checkpoint_model(*saved.model),
                      saved.optimizer);
      Training loaded(group, rank, 7);
      load_checkpoint(folder / name, checkpoint_model(*loaded.model),
                      loaded.optimizer);
      step(saved);
      step(loaded);
      for (const size_t i : {0, 1}) {
        EXPECT_TRUE(at::equal(loaded.shard(i), saved.shard(i)))
            << i << ", " << name;
      }
    }
  });
  fs::remove_all(folder);
}

TEST_F(VendorBackendTest, AModuleOnTheCpuIsRefusedWithoutACpuBackend) {
  run_ranks_on_devices(2, [&](const Group& with_cpu, int /*rank*/) {
    const Group group = without_cpu(with_cpu);
    EXPECT_THAT(([&] {
                  sharded_model(
                      {{.name = "all",
                        .parameters = {{"w", at::ones({3}).requires_grad_()}}}},
                      group);
                }),
                ThrowsMessage<c10::ValueError>(HasSubstr(
                    "is on cpu, for which the process group has no")));
  });
}

// NCCL refuses tensors of two ranks on one device.
TEST_F(VendorBackendTest, ControlTensorsAreOnTheModelsDevice) {
  run_ranks_on_devices(2, [](const Group& with_cpu, int rank) {
    const Group group = without_cpu(with_cpu);
    const c10::DeviceGuard all_on_the_first(simulated::device(0));
    EXPECT_EQ(control_device(*group).index(), 0);
    const Tensors parameters = {
        at::ones({3}, on_device(at::kFloat, rank)).requires_grad_()};
    const Reducer reducer(parameters, group, {});
    EXPECT_EQ(control_device(*group).index(), rank);
    suggest_control_device(group, simulated::device(0));
    EXPECT_EQ(control_device(*group).index(), rank);
    suggest_control_device(with_cpu, simulated::device(rank));
    EXPECT_TRUE(control_device(*with_cpu).is_cpu());
  });
}

// The destructor shuts down the groups of its units, which wait for the peers.
TEST_F(VendorBackendTest, AModelMayBeDestroyedEarlierOnOneRank) {
  run_ranks_on_devices(2, [](const Group& group, int rank) {
    auto model = sharded_model(
        {{.name = "all",
          .parameters = {{"w", at::ones({3}, on_device(at::kFloat, rank))
                                   .requires_grad_()}}}},
        group);
    if (rank == 0) model.reset();
    EXPECT_EQ(summed(group, at::ones({4}, on_device(at::kFloat, rank))), 8);
  });
}

TEST_F(VendorBackendTest, SubgroupsOfGlooForADeviceUseGloo) {
  run_ranks_on_devices(2, [](const Group& with_host, int rank) {
    const auto gloo = with_host->getBackend(at::kCPU);
    const auto group =
        c10::make_intrusive<c10d::ProcessGroup>(with_host->getStore(), rank, 2);
    group->setBackend(at::kCPU, c10d::ProcessGroup::BackendType::GLOO, gloo);
    group->setBackend(at::kPrivateUse1, c10d::ProcessGroup::BackendType::GLOO,
                      gloo);
    remember_make_backend(group, at::kPrivateUse1,
                          with_host_backend().make_backend);
    const GroupScope both =
        make_subgroup(group, {0, 1}, simulated::device(rank));
    EXPECT_EQ(both.group()->getBackend(at::kPrivateUse1)->getBackendName(),
              "gloo");
  });
}

TEST_F(VendorBackendTest, OneRankNeedsNoPeers) {
  const c10::DeviceGuard back_to_this_one(simulated::device());
  const Group group = init_process_group(LaunchEnvironment{.local_rank = 1},
                                         with_host_backend());
  EXPECT_EQ(at::ones({1}, at::TensorOptions("privateuseone")).device().index(),
            1);
  EXPECT_EQ(summed(group, at::ones({4}, on_device(at::kFloat, 1))), 4);
}

TEST_F(VendorBackendTest, InvalidBackendsAndDevicesAreRefused) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  ProcessGroupOptions options = with_host_backend();
  options.make_backend = [](const BackendPlace&) {
    return c10::make_intrusive<IdenticalRanksBackend>(1, 2);
  };
  EXPECT_THAT([&] { make_process_group(store, 0, 1, options); },
              ThrowsMessage<c10::ValueError>(HasSubstr(
                  "a backend for rank 0 of 1, found one for rank 1 of 2")));
  options.make_backend = [](const BackendPlace&) { return nullptr; };
  EXPECT_THAT([&] { make_process_group(store, 0, 1, options); },
              ThrowsMessage<c10::ValueError>(HasSubstr("found none")));
  EXPECT_THAT(
      [&] {
        init_process_group(LaunchEnvironment{.local_rank = 99},
                           with_host_backend());
      },
      ThrowsMessage<c10::ValueError>(HasSubstr("local rank 99: expected")));
  options.device_type = at::kCPU;
  EXPECT_THAT([&] { make_process_group(store, 0, 1, options); },
              ThrowsMessage<c10::ValueError>(HasSubstr("Set device_type")));
  options.device_type = at::kXPU;
  EXPECT_THAT([&] { init_process_group(LaunchEnvironment{}, options); },
              ThrowsMessage<c10::ValueError>(HasSubstr("xpu")));
}

}  // namespace
}  // namespace brigade
