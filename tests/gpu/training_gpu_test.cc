// Data-parallel training on a CUDA device over NCCL with world size 1: the bits
// of the unwrapped module, and a host that does not wait for the device.

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>

#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>
#include <vector>

#include "brigade/comm/process_group.h"
#include "brigade/comm_hooks/comm_hooks.h"
#include "brigade/ddp/distributed_data_parallel.h"
#include "brigade/tests/gpu/busy_device.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using testing::current_stream;
using testing::kDevice;
using testing::keep_busy;

struct Mode {
  std::string name;
  ReducerOptions options;
};

std::vector<Mode> all_modes() {
  std::vector<Mode> modes;
  const auto add = [&](std::string name, auto change) {
    Mode mode{std::move(name), {.bucket_cap_bytes = {256}}};
    change(mode.options);
    modes.push_back(std::move(mode));
  };
  add("Views", [](ReducerOptions&) {});
  add("Copies", [](auto& o) { o.gradient_as_bucket_view = false; });
  add("StaticGraph", [](auto& o) { o.static_graph = true; });
  add("FindUnused", [](auto& o) { o.find_unused_parameters = true; });
  add("Reproducible", [](auto& o) { o.reproducible = true; });
  add("NoneUnconfirmed", [](auto& o) { o.max_unconfirmed_iterations = 0; });
  return modes;
}

// Two layers; a forward may skip the second.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    first = register_module("first", torch::nn::Linear(5, 7));
    second = register_module("second", torch::nn::Linear(7, 7));
  }

  at::Tensor forward(const at::Tensor& x, bool uses_second) {
    const at::Tensor h = first(x).tanh();
    return uses_second ? second(h) : h;
  }

  torch::nn::Linear first = nullptr;
  torch::nn::Linear second = nullptr;
};
TORCH_MODULE(Net);

Net make_net() {
  torch::manual_seed(0);
  Net net;
  net->to(kDevice);
  return net;
}

at::Tensor batch_of(int step) {
  torch::manual_seed(step);
  return torch::randn({4, 5}).to(kDevice);
}

class TrainingGpuTest : public ::testing::TestWithParam<Mode> {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device";
    c10::impl::VirtualGuardImpl(at::kCUDA).setDevice(kDevice);
    scope_.emplace(
        make_process_group(c10::make_intrusive<c10d::HashStore>(), /*rank=*/0,
                           /*world_size=*/1, {.device_type = at::kCUDA}));
  }

  DistributedDataParallel<Net> wrap(const Net& net) const {
    return {net, scope_->group(), {.reducer = GetParam().options}};
  }

  std::optional<GroupScope> scope_;
};

TEST_P(TrainingGpuTest, HasTheBitsOfTheUnwrappedModule) {
  const bool may_leave_out = GetParam().options.find_unused_parameters;
  Net alone = make_net();
  Net net = make_net();
  DistributedDataParallel<Net> model = wrap(net);
  torch::optim::AdamW alone_optimizer(alone->parameters());
  torch::optim::AdamW optimizer(net->parameters());
  for (int step = 0; step < 6; ++step) {
    const bool uses_second = !may_leave_out || step % 2 == 0;
    const at::Tensor x = batch_of(step);
    alone_optimizer.zero_grad();
    alone(x, uses_second).square().mean().backward();
    alone_optimizer.step();
    optimizer.zero_grad();
    model(x, uses_second).square().mean().backward();
    optimizer.step();
    for (size_t i = 0; i < net->parameters().size(); ++i) {
      EXPECT_TRUE(at::equal(net->parameters()[i], alone->parameters()[i]))
          << "parameter " << i << ", step " << step;
    }
  }
}

// find_unused_parameters waits for the used-parameter bitmap.
TEST_P(TrainingGpuTest, HostDoesNotWaitForTheDevice) {
  if (GetParam().options.find_unused_parameters)
    GTEST_SKIP() << "waits for the bitmap";
  Net net = make_net();
  DistributedDataParallel<Net> model = wrap(net);
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  const at::Tensor x = batch_of(0);
  const auto train = [&] {
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      model(x, true).square().mean().backward();
      optimizer.step();
    }
  };
  train();  // loads kernels, pins memory
  keep_busy();
  current_stream().synchronize();
  keep_busy();
  ASSERT_FALSE(current_stream().query());
  train();
  EXPECT_FALSE(current_stream().query()) << "a step has waited for the device";
}

TEST_P(TrainingGpuTest, CompressesGradients) {
  for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16}) {
    Net alone = make_net();
    Net net = make_net();
    DistributedDataParallelOptions options{.reducer = GetParam().options};
    if (options.reducer.reproducible) GTEST_SKIP() << "needs its own hook";
    options.reducer.comm_hook = dtype == at::kHalf ? fp16_hook(scope_->group())
                                                   : bf16_hook(scope_->group());
    DistributedDataParallel<Net> model(net, scope_->group(), options);
    for (int step = 0; step < 3; ++step) {
      alone->zero_grad();
      alone(batch_of(step), true).square().mean().backward();
      net->zero_grad();
      model(batch_of(step), true).square().mean().backward();
      for (size_t i = 0; i < net->parameters().size(); ++i) {
        const at::Tensor expected =
            alone->parameters()[i].grad().to(dtype).to(at::kFloat);
        EXPECT_TRUE(at::equal(net->parameters()[i].grad(), expected))
            << dtype << ", parameter " << i << ", step " << step;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Nccl, TrainingGpuTest,
                         ::testing::ValuesIn(all_modes()),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace brigade
