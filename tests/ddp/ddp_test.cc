#include <torch/script.h>
#include <torch/torch.h>

#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

#include "brigade/comm/process_group.h"
#include "brigade/comm_hooks/comm_hooks.h"
#include "brigade/ddp/distributed_data_parallel.h"
#include "brigade/tests/support/local_ranks.h"
#include "brigade/tests/support/recording_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::run_ranks;
using ::testing::ThrowsMessage;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// Module with buffers (batch norm), frozen parameters, and a parameter with two
// names.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    first = register_module("first", torch::nn::Linear(4, 6));
    norm = register_module("norm", torch::nn::BatchNorm1d(6));
    frozen = register_module("frozen", torch::nn::Linear(6, 6));
    last = register_module("last", torch::nn::Linear(6, 3));
    frozen->weight.requires_grad_(false);
    frozen->bias.requires_grad_(false);
    register_parameter("again", last->bias);
  }

  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x,
                                             double factor) {
    const at::Tensor hidden = frozen(torch::relu(norm(first(x))));
    return {last(hidden) * factor, hidden};
  }

  torch::nn::Linear first{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Linear frozen{nullptr};
  torch::nn::Linear last{nullptr};
};
TORCH_MODULE(Net);

Net make_net(uint64_t seed) {
  static std::mutex seeding;
  const std::lock_guard<std::mutex> lock(seeding);
  torch::manual_seed(seed);
  return Net();
}

at::Tensor input_of(int rank, int step) {
  return at::sin(at::arange(20, at::kFloat).reshape({5, 4}) + 31 * rank +
                 7 * step);
}

at::Tensor loss_of(const std::tuple<at::Tensor, at::Tensor>& outputs) {
  return std::get<0>(outputs).square().mean() +
         std::get<1>(outputs).abs().mean();
}

void expect_equal_modules(const torch::nn::Module& a,
                          const torch::nn::Module& b) {
  const auto others = b.named_parameters();
  for (const auto& item : a.named_parameters()) {
    EXPECT_TRUE(at::equal(item.value(), others[item.key()])) << item.key();
  }
  const auto other_buffers = b.named_buffers();
  for (const auto& item : a.named_buffers()) {
    EXPECT_TRUE(at::equal(item.value(), other_buffers[item.key()]))
        << item.key();
  }
}

TEST(DistributedDataParallelTest, ABackwardWithoutTheWrappersForwardIsAnError) {
  run_ranks(2, [](const Group& group) {
    DistributedDataParallelOptions options;
    options.reducer.one_backward_per_forward = true;
    Net net = make_net(7);
    DistributedDataParallel model(net, group, options);
    const auto [output, hidden] = net->forward(torch::ones({4, 4}), 1.0);
    EXPECT_THAT(
        [&] { output.sum().backward(); },
        ThrowsMessage<c10::Error>(HasSubstr("without a forward of the")));
  });
}

TEST(DistributedDataParallelTest, StartsFromTheModelOfRank0) {
  for (int world_size = 1; world_size <= 4; ++world_size) {
    run_ranks(world_size, [](const Group& group) {
      Net net = make_net(100 + group->getRank());
      net->norm->running_mean.fill_(group->getRank());
      DistributedDataParallel model(net, group);
      Net of_rank_0 = make_net(100);
      of_rank_0->norm->running_mean.fill_(0);
      expect_equal_modules(*net, *of_rank_0);
    });
  }
}

// Compares two ranks with two copies in one process whose gradients are
// averaged. The bits are equal, since a + b = b + a.
TEST(DistributedDataParallelTest, TrainsAsOneProcessThatAverages) {
  constexpr int kSteps = 6;
  const auto sgd = [](Net& net) {
    return torch::optim::SGD(net->parameters(),
                             torch::optim::SGDOptions(0.1).momentum(0.9));
  };
  Net reference = make_net(7);
  {
    Net other = make_net(7);
    torch::optim::SGD optimizers[] = {sgd(reference), sgd(other)};
    for (int s = 0; s < kSteps; ++s) {
      for (size_t b = 0; b < reference->buffers().size(); ++b) {
        other->buffers()[b].copy_(reference->buffers()[b]);
      }
      for (auto& optimizer : optimizers) optimizer.zero_grad();
      loss_of(reference->forward(input_of(0, s), 1.5)).backward();
      loss_of(other->forward(input_of(1, s), 1.5)).backward();
      for (size_t i = 0; i < reference->parameters().size(); ++i) {
        const at::Tensor first = reference->parameters()[i];
        const at::Tensor second = other->parameters()[i];
        if (!first.requires_grad()) continue;
        const at::Tensor mean = first.grad() * 0.5 + second.grad() * 0.5;
        first.mutable_grad() = mean;
        second.mutable_grad() = mean;
      }
      for (auto& optimizer : optimizers) optimizer.step();
    }
  }
  for (const bool views : {true, false}) {
    run_ranks(2, [&](const Group& group) {
      Net net = make_net(7);
      DistributedDataParallel model(
          net, group, {.reducer = {.gradient_as_bucket_view = views}});
      torch::optim::SGD optimizer = sgd(net);
      for (int s = 0; s < kSteps; ++s) {
        optimizer.zero_grad(/*set_to_none=*/s % 2 == 0);
        loss_of(model(input_of(group->getRank(), s), 1.5)).backward();
        optimizer.step();
      }
      for (const auto& item : reference->named_parameters()) {
        EXPECT_TRUE(
            at::equal(net->named_parameters()[item.key()], item.value()))
            << item.key() << " views " << views;
      }
      if (group->getRank() == 0) expect_equal_modules(*net, *reference);
    });
  }
}

TEST(DistributedDataParallelTest, AccumulatesInsideNoSync) {
  run_ranks(2, [](const Group& group) {
    Net net = make_net(3);
    net->eval();
    DistributedDataParallel model(net, group);
    const auto gradients = [&] {
      std::vector<at::Tensor> copies;
      for (const at::Tensor& p : net->parameters()) {
        if (p.requires_grad()) copies.push_back(p.grad().clone());
      }
      return copies;
    };
    {
      const NoSync outer = model.no_sync();
      {
        const NoSync inner = model.no_sync();
        loss_of(model(input_of(group->getRank(), 0), 1.0)).backward();
      }
      loss_of(model(input_of(group->getRank(), 1), 1.0)).backward();
    }
    EXPECT_EQ(model.reducer().statistics().buckets_launched, 0);
    loss_of(model(input_of(group->getRank(), 2), 1.0)).backward();
    EXPECT_GT(model.reducer().statistics().buckets_launched, 0);
    for (at::Tensor mine : gradients()) {
      at::Tensor of_rank_0 = mine.clone();
      std::vector<at::Tensor> tensors = {of_rank_0};
      group->broadcast(tensors)->wait();
      EXPECT_TRUE(at::equal(mine, of_rank_0));
    }
  });
}

TEST(DistributedDataParallelTest, BroadcastsBuffersBeforeForwardsItReduces) {
  for (const bool broadcast : {true, false}) {
    run_ranks(2, [&](const Group& group) {
      Net net = make_net(3);
      DistributedDataParallel model(net, group,
                                    {.broadcast_buffers = broadcast});
      net->eval();
      net->norm->running_mean.fill_(group->getRank());
      {
        const NoSync no_sync = model.no_sync();
        model(input_of(0, 0), 1.0);
      }
      {
        const at::NoGradGuard no_grad;
        model(input_of(0, 0), 1.0);
      }
      EXPECT_EQ(net->norm->running_mean[0].item<float>(), group->getRank());
      model(input_of(0, 0), 1.0);
      EXPECT_EQ(net->norm->running_mean[0].item<float>(),
                broadcast ? 0 : group->getRank());
    });
  }
}

TEST(DistributedDataParallelTest, WrapsHoldersPointersAndSequentials) {
  torch::nn::Sequential sequential(torch::nn::Linear(4, 3), torch::nn::ReLU(),
                                   torch::nn::Linear(3, 1));
  DistributedDataParallel of_sequential(sequential, single_process_group());
  of_sequential(input_of(0, 0)).sum().backward();
  EXPECT_EQ(of_sequential.reducer().statistics().reduced, 1);

  auto pointer = std::make_shared<NetImpl>();
  DistributedDataParallel of_pointer(pointer, single_process_group());
  loss_of(of_pointer(input_of(0, 0), 1.0)).backward();
  EXPECT_EQ(of_pointer.reducer().statistics().reduced, 1);
}

TEST(DistributedDataParallelTest, WrapsScriptModules) {
  run_ranks(2, [](const Group& group) {
    torch::jit::Module module("Scripted");
    module.register_parameter("weight", at::full({4}, group->getRank() + 1.0),
                              false);
    module.register_buffer("offset", at::full({4}, 1.0 * group->getRank()));
    module.define(R"(
      def forward(self, x, factor: float):
        return (x * self.weight + self.offset) * factor
    )");
    module.attr("weight").toTensor().requires_grad_();
    DistributedDataParallel model(module, group);
    EXPECT_TRUE(at::equal(module.attr("weight").toTensor(), at::ones({4})));
    const at::Tensor x = at::full({4}, 2.0 * (group->getRank() + 1));
    const c10::IValue output = model(x, 3.0);
    output.toTensor().sum().backward();
    EXPECT_TRUE(
        at::equal(module.attr("weight").toTensor().grad(), at::full({4}, 9.0)));
    EXPECT_TRUE(at::equal(module.attr("offset").toTensor(), at::zeros({4})));
  });
}

// Two steps later the buckets are those of a profile: one for all parameters.
size_t num_buckets_after_two_steps(const Group& group,
                                   DistributedDataParallelOptions options) {
  torch::nn::Sequential net(torch::nn::Linear(600, 600),
                            torch::nn::Linear(600, 600));
  options.broadcast_buffers = false;
  DistributedDataParallel model(net, group, std::move(options));
  for (int step = 0; step < 2; ++step) {
    model(torch::ones({1, 600})).sum().backward();
  }
  return model.reducer().plan().num_buckets();
}

TEST(DistributedDataParallelTest, PlansBucketsByDefaultWhereBitsCannotVary) {
  run_ranks(2, [](const Group& group) {
    EXPECT_EQ(num_buckets_after_two_steps(group, {}), 1U);
    EXPECT_EQ(num_buckets_after_two_steps(group, {.auto_plan = false}), 2U);
    EXPECT_EQ(num_buckets_after_two_steps(
                  group, {.reducer = {.bucket_cap_bytes = {1000}}}),
              4U);
    EXPECT_EQ(num_buckets_after_two_steps(
                  group, {.reducer = {.bucket_plan = {{3}, {2, 1}, {0}}}}),
              3U);
    EXPECT_EQ(num_buckets_after_two_steps(
                  group, {.reducer = {.comm_hook = fp16_hook(group)}}),
              2U);
  });
  run_ranks(3, [](const Group& group) {
    EXPECT_EQ(num_buckets_after_two_steps(group, {}), 1U);  // shared memory
    EXPECT_EQ(
        num_buckets_after_two_steps(group, {.reducer = {.reproducible = true}}),
        1U);
    EXPECT_EQ(num_buckets_after_two_steps(
                  group, {.reducer = {.verify_across_ranks = false}}),
              2U);
  });
}

TEST(DistributedDataParallelTest, NamesAModuleWithoutTrainableParameters) {
  run_ranks(2, [](const Group& group) {
    Net net = make_net(3);
    if (group->getRank() == 1) {
      for (at::Tensor& p : net->parameters()) p.requires_grad_(false);
    }
    try {
      DistributedDataParallel model(net, group);
      ADD_FAILURE() << "no error on rank " << group->getRank();
    } catch (const c10::ValueError& error) {
      EXPECT_THAT(error.what(),
                  AllOf(HasSubstr("NetImpl has no parameter that requires"),
                        HasSubstr("rank 1")));
    }
  });
}

TEST(DistributedDataParallelTest, NamesABufferThatDiffersAcrossRanks) {
  run_ranks(2, [](const Group& group) {
    Net net = make_net(3);
    if (group->getRank() == 1) {
      net->norm->register_buffer("extra", at::zeros({2}));
    }
    try {
      DistributedDataParallel model(net, group);
      ADD_FAILURE() << "no error on rank " << group->getRank();
    } catch (const c10::ValueError& error) {
      EXPECT_THAT(error.what(),
                  AllOf(HasSubstr("norm.extra"), HasSubstr("rank 1")));
    }
  });
}

}  // namespace
}  // namespace brigade
