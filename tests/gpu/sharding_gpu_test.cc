// Sharded training on a CUDA device with world size 1: real streams, and a host
// that does not wait for them.

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "brigade/comm/group/group_collectives.h"
#include "brigade/comm/process_group.h"
#include "brigade/fsdp/segmented_model.h"
#include "brigade/tests/gpu/busy_device.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using testing::current_stream;
using testing::kDevice;
using testing::keep_busy;

// Returns the gradients of each step; each unit computes h * w, in integers.
std::vector<at::Tensor> train(at::Device device,
                              const FullyShardOptions& options, int num_steps) {
  const auto group = single_process_group();
  std::vector<UnitRequest> requests;
  std::vector<at::Tensor> weights;
  for (int u = 0; u < 4; ++u) {
    weights.push_back(
        at::full({8, 8}, u % 2 == 0 ? 1.0 : -1.0, at::TensorOptions(device))
            .requires_grad_());
    requests.push_back({.name = c10::str(u),
                        .parameters = {{.name = "w", .tensor = weights.back()}},
                        .reshard_after_forward = u > 0});
  }
  SegmentedModel model(make_sharded_units(requests, group, options), group,
                       options);
  std::vector<at::Tensor> gradients;
  for (int step = 0; step < num_steps; ++step) {
    model
        .forward(
            [&](at::Tensor h) {
              for (const at::Tensor& weight : weights) h = h * weight;
              return h;
            },
            at::full({8, 8}, step + 1.0, at::TensorOptions(device)))
        .sum()
        .backward();
    const torch::NoGradGuard no_grad;
    for (at::Tensor& weight : weights) {
      gradients.push_back(gather_whole(weight.grad()));
      weight.neg_();
      weight.mutable_grad().reset();
    }
  }
  return gradients;
}

TEST(ShardingGpuTest, MatchesTrainingOnTheCpu) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device";
  for (const bool is_mixed : {false, true}) {
    FullyShardOptions options;
    if (is_mixed) {
      options.param_dtype = at::kBFloat16;
      options.reduce_dtype = at::kFloat;
    }
    const auto expected = train(at::kCPU, options, 3);
    const auto found = train(kDevice, options, 3);
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); ++i) {
      EXPECT_TRUE(at::equal(found[i].cpu(), expected[i])) << i;
    }
  }
}

TEST(ShardingGpuTest, HostDoesNotWaitForTheDevice) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device";
  const FullyShardOptions options = {.param_dtype = at::kBFloat16,
                                     .reduce_dtype = at::kFloat};
  train(kDevice, options, 2);  // loads kernels, and pins memory
  keep_busy();
  current_stream().synchronize();
  keep_busy();
  ASSERT_FALSE(current_stream().query());
  train(kDevice, options, 3);
  EXPECT_FALSE(current_stream().query()) << "a step has waited for the device";
}

// Sharding relies on this: NCCL's futures are complete at launch, and wait()
// makes streams wait.
TEST(ShardingGpuTest, NcclFuturesAreCompleteAtLaunch) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device";
  c10::impl::VirtualGuardImpl(at::kCUDA).setDevice(kDevice);
  const GroupScope scope(
      make_process_group(c10::make_intrusive<c10d::HashStore>(), /*rank=*/0,
                         /*world_size=*/1, {.device_type = at::kCUDA}));
  const at::Tensor whole = at::arange(1024.0, at::TensorOptions(kDevice));
  const at::Tensor shard = at::empty_like(whole);
  const auto launch = [&] {
    return reduce_scatter_into(*scope.group(), shard, whole)->getFuture();
  };
  launch()->waitAndThrow();  // makes the communicator
  current_stream().synchronize();
  shard.zero_();
  keep_busy();
  const auto sum = launch();
  EXPECT_TRUE(sum->completed());
  sum->waitAndThrow();
  EXPECT_FALSE(current_stream().query()) << "the host has waited";
  EXPECT_TRUE(at::equal(shard, whole));
  const auto gathered =
      all_gather_into(*scope.group(), whole, whole)->getFuture();
  EXPECT_TRUE(gathered->completed());
  gathered->waitAndThrow();
  EXPECT_TRUE(at::equal(shard, whole));
}

}  // namespace
}  // namespace brigade
