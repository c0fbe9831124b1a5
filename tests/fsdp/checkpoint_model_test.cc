#include "brigade/fsdp/checkpoint_model.h"

#include <torch/torch.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/tests/checkpoint/checkpoint_checks.h"
#include "brigade/tests/fsdp/sharded_net.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace checkpoint_model_test {

using testing::bytes_of_file;
using testing::loss_of;
using testing::Net;
using testing::run_ranks;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// Sizes that no number of ranks divides.
const std::vector<int64_t> kWidths = {5, 7, 3, 6, 4};

class CheckpointModelTest : public ::testing::Test {
 protected:
  void SetUp() override { std::filesystem::create_directories(base_); }
  void TearDown() override { std::filesystem::remove_all(base_); }

  std::string path(const std::string& name) const { return base_ / name; }

  // The same batch on all ranks, so that their number changes no bit: powers of
  // two of equal gradients add up and divide exactly.
  static void train(ShardedRoot& root, const Net& net,
                    torch::optim::Optimizer& optimizer, int from, int to) {
    for (int step = from; step < to; ++step) {
      optimizer.zero_grad();
      loss_of(root.forward([&] {
        return net.run(root, net.input(0, step).to(torch::kBFloat16));
      })).backward();
      optimizer.step();
    }
  }

 private:
  const std::filesystem::path base_ =
      std::filesystem::path(::testing::TempDir()) /
      absl::StrCat("brigade_checkpoint_model_", ::getpid());
};

TEST_F(CheckpointModelTest, AnyMeshResumesBitForBit) {
  run_ranks(2, [&](const Group& group) {
    Net net(kWidths);
    ShardedRoot root(net.units(), group, {.param_dtype = torch::kBFloat16});
    torch::optim::AdamW optimizer(root.shards(), 0.01);
    train(root, net, optimizer, 0, 3);
    for (const char* name : {"3.safetensors", "3"}) {
      save_checkpoint(path(name), checkpoint_model(root), optimizer,
                      {{"step", "3"}});
    }
    train(root, net, optimizer, 3, 6);
    save_checkpoint(path("6.safetensors"), checkpoint_model(root), optimizer);
  });
  for (const char* name : {"3.safetensors", "3"}) {
    for (const auto& [num_ranks, num_shards] :
         {std::pair(1, 1), std::pair(2, 1), std::pair(4, 4), std::pair(4, 2)}) {
      run_ranks(num_ranks, [&, num_shards = num_shards](const Group& group) {
        Net net(kWidths, /*seed=*/99);
        ShardedRoot root(
            net.units(), group,
            {.num_shards = num_shards, .param_dtype = torch::kBFloat16});
        torch::optim::AdamW optimizer(root.shards(), 0.01);
        EXPECT_EQ(load_checkpoint(path(name), checkpoint_model(root), optimizer)
                      .at("step"),
                  "3");
        train(root, net, optimizer, 3, 6);
        save_checkpoint(path("again.safetensors"), checkpoint_model(root),
                        optimizer);
      });
      EXPECT_EQ(bytes_of_file(path("again.safetensors")),
                bytes_of_file(path("6.safetensors")))
          << name << " on " << num_ranks << "/" << num_shards;
    }
  }
}

// Data-parallel ranks, which hold all, and other units.
TEST_F(CheckpointModelTest, OtherUnitsAndNoneLoadIt) {
  run_ranks(3, [&](const Group& group) {
    Net net(kWidths);
    ShardedRoot root(net.units(), group, {});
    save_checkpoint(path("folder"), checkpoint_model(root));
  });
  const Net expected(kWidths);
  run_ranks(2, [&](const Group& group) {
    Net net(kWidths, /*seed=*/99);
    UnitSpec all = {.name = "all", .parameters = {}};
    std::vector<CheckpointTensor> whole;
    for (const UnitSpec& unit : net.units()) {
      for (const NamedParameter& parameter : unit.parameters) {
        all.parameters.push_back(
            {.name = parameter.name,
             .tensor = torch::zeros_like(parameter.tensor).requires_grad_()});
        whole.push_back(unsharded_tensor(parameter.name, parameter.tensor));
      }
    }
    load_checkpoint(path("folder"), CheckpointModel(whole, group));
    for (size_t i = 0; i < net.parameters().size(); ++i) {
      EXPECT_TRUE(at::equal(net.parameters()[i], expected.parameters()[i]));
    }
    ShardedRoot root({all}, group, {});
    load_checkpoint(path("folder"), checkpoint_model(root));
    root.unshard();
    for (size_t i = 0; i < whole.size(); ++i) {
      EXPECT_TRUE(at::equal(all.parameters[i].tensor, whole[i].held));
    }
    root.reshard(/*writes=*/false);
  });
}

}  // namespace checkpoint_model_test
}  // namespace brigade
