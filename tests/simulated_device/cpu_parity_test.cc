// Reproducible reduction on devices gives the bits of ranks on CPUs.

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <tuple>
#include <utility>
#include <vector>

#include "brigade/fsdp/fully_shard.h"
#include "brigade/reducer/reducer.h"
#include "brigade/tests/simulated_device/host_backend.h"
#include "brigade/tests/support/local_ranks.h"
#include "brigade/tests/support/simulated_device/stream_test.h"
#include "gtest/gtest.h"

namespace brigade {
namespace cpu_parity_test {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Tensors = std::vector<at::Tensor>;
using Train = std::function<Tensors(const Group&, c10::Device)>;

Tensors to_cpu(const Tensors& tensors) {
  Tensors copies;
  for (const at::Tensor& tensor : tensors) {
    copies.push_back(tensor.detach().cpu());
  }
  return copies;
}

// Returns the results of ranks on CPUs, by rank.
std::vector<Tensors> train_on_cpus(int world_size, const Train& train) {
  std::vector<Tensors> by_rank(world_size);
  testing::run_ranks(world_size, [&](const Group& group) {
    by_rank[group->getRank()] = to_cpu(train(group, at::kCPU));
  });
  return by_rank;
}

void expect_on_devices(const std::vector<Tensors>& expected,
                       const Train& train) {
  testing::run_ranks_on_devices(
      static_cast<int>(expected.size()), [&](const Group& group, int rank) {
        const Tensors found = to_cpu(train(group, simulated::device(rank)));
        ASSERT_EQ(found.size(), expected[rank].size());
        for (size_t i = 0; i < found.size(); ++i) {
          EXPECT_TRUE(at::equal(found[i], expected[rank][i]))
              << "rank " << rank << ", tensor " << i;
        }
      });
  simulated::expect_no_races();
}

// World size, dtype.
class ReproducibleOnDevicesTest
    : public simulated::StreamTest,
      public ::testing::WithParamInterface<std::tuple<int, at::ScalarType>> {
 protected:
  static at::Tensor values(int rank, int step, int64_t numel) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(
        static_cast<uint64_t>(10000 * rank + 100 * step + numel));
    return at::randn({numel}, generator,
                     at::TensorOptions(std::get<1>(GetParam()))) *
           (rank % 2 == 0 ? 1 : 1000);
  }

  // Returns the gradients of three steps.
  static Tensors train(const ReducerOptions& options, const Group& group,
                       c10::Device device) {
    const auto on_device =
        at::TensorOptions(std::get<1>(GetParam())).device(device);
    Tensors parameters;
    // Some are multiples of the world size.
    for (const int64_t numel : {7, 64, 1, 300, 12}) {
      parameters.push_back(at::ones({numel}, on_device).requires_grad_());
    }
    Reducer reducer(parameters, group, options);
    Tensors gradients;
    for (int step = 0; step < 3; ++step) {
      at::Tensor loss = at::zeros({}, on_device);
      for (const at::Tensor& parameter : parameters) {
        loss = loss +
               (parameter *
                values(group->getRank(), step, parameter.numel()).to(device))
                   .sum();
      }
      loss = at::real(loss);
      reducer.prepare_for_backward(loss);
      loss.backward();
      for (const at::Tensor& parameter : parameters) {
        gradients.push_back(parameter.grad().detach().clone());
        parameter.mutable_grad().reset();
      }
    }
    return gradients;
  }
};

TEST_P(ReproducibleOnDevicesTest, BitsAreThoseOfTheCpu) {
  const int world_size = std::get<0>(GetParam());
  ReducerOptions options;
  options.reproducible = true;
  const Train train = [&](const Group& group, c10::Device device) {
    return ReproducibleOnDevicesTest::train(options, group, device);
  };
  const std::vector<Tensors> expected = train_on_cpus(world_size, train);
  for (const int64_t cap_bytes : {64, 1 << 20}) {
    options.bucket_cap_bytes = {cap_bytes};
    options.gradient_as_bucket_view = cap_bytes == 64;
    expect_on_devices(expected, train);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Ranks, ReproducibleOnDevicesTest,
    ::testing::Combine(::testing::Values(1, 2, 3, 4),
                       ::testing::Values(at::kFloat, at::kDouble, at::kHalf,
                                         at::kBFloat16, at::kComplexFloat)));

using ShardedFloat16OnDevicesTest = simulated::StreamTest;

// The average of four gradients is 16384, their sum more than float16 has.
TEST_F(ShardedFloat16OnDevicesTest, OnlyAveragesMustFit) {
  for (const int num_shards : {1, 2, 4}) {
    for (const bool in_order : {false, true}) {
      testing::run_ranks_on_devices(4, [&](const Group& group, int rank) {
        torch::nn::Module net;
        const at::Tensor weight = net.register_parameter(
            "weight", at::ones({4}, simulated::device(rank)));
        const auto sharded = fully_shard(net, group,
                                         {.num_shards = num_shards,
                                          .reduce_dtype = at::kHalf,
                                          .reproducible = in_order});
        sharded->forward([&] { return (weight * 16384).sum(); }).backward();
        EXPECT_EQ(sharded->clip_grad_norm(1e9), 2 * 16384)
            << num_shards << " shards";
      });
    }
  }
  simulated::expect_no_races();
}

}  // namespace cpu_parity_test
}  // namespace brigade
