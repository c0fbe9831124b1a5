#include "brigade/fsdp/checkpoint/optimizer_state.h"

#include <torch/torch.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "brigade/fsdp/checkpoint/safetensors_file.h"
#include "brigade/fsdp/checkpoint/sharded_state.h"
#include "brigade/tests/fsdp/checkpoint_checks.h"
#include "brigade/tests/fsdp/sharded_net.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace optimizer_state_test {

namespace optim = torch::optim;

using ::testing::AllOf;
using testing::bytes_of_file;
using testing::error_of;
using ::testing::HasSubstr;
using testing::loss_of;
using testing::Net;
using testing::run_ranks;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Tensors = std::vector<at::Tensor>;

struct OptimizerCase {
  std::string name;
  std::function<std::unique_ptr<optim::Optimizer>(Tensors)> make;
  std::vector<std::string> fields;  // of a parameter

  friend void PrintTo(const OptimizerCase& c, std::ostream* out) {
    *out << c.name;
  }
};

template <typename Optimizer, typename Options>
OptimizerCase optimizer_case(std::string name, Options options,
                             std::vector<std::string> fields) {
  return {std::move(name),
          [options](Tensors parameters) {
            return std::make_unique<Optimizer>(std::move(parameters), options);
          },
          std::move(fields)};
}

std::vector<OptimizerCase> all_cases() {
  return {
      optimizer_case<optim::SGD>("Sgd", optim::SGDOptions(0.1), {}),
      optimizer_case<optim::SGD>("SgdMomentum",
                                 optim::SGDOptions(0.1).momentum(0.9),
                                 {"momentum_buffer"}),
      optimizer_case<optim::Adam>("Adam", optim::AdamOptions(0.01),
                                  {"exp_avg", "exp_avg_sq", "step"}),
      optimizer_case<optim::Adam>(
          "AdamAmsgrad", optim::AdamOptions(0.01).amsgrad(true),
          {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"}),
      optimizer_case<optim::AdamW>("AdamW", optim::AdamWOptions(0.01),
                                   {"exp_avg", "exp_avg_sq", "step"}),
      optimizer_case<optim::AdamW>(
          "AdamWAmsgrad", optim::AdamWOptions(0.01).amsgrad(true),
          {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"}),
      optimizer_case<optim::RMSprop>("RmsProp", optim::RMSpropOptions(0.01),
                                     {"square_avg", "step"}),
      optimizer_case<optim::RMSprop>(
          "RmsPropCentered",
          optim::RMSpropOptions(0.01).momentum(0.5).centered(true),
          {"grad_avg", "momentum_buffer", "square_avg", "step"}),
      optimizer_case<optim::Adagrad>(
          "Adagrad", optim::AdagradOptions(0.1).lr_decay(0.1), {"step", "sum"}),
  };
}

// Blocks of sizes that no number of ranks divides; the last block is left out
// of the first steps, and so has no state, or less of it.
void train(ShardedRoot& root, const Net& net, optim::Optimizer& optimizer,
           int from, int to) {
  for (int step = from; step < to; ++step) {
    optimizer.zero_grad();
    const std::vector<size_t> order = step < 2
                                          ? std::vector<size_t>{0, 1, 2}
                                          : std::vector<size_t>{0, 1, 2, 3};
    // The same batch on all ranks, so that their number changes nothing: powers
    // of two of equal gradients add up and divide exactly.
    loss_of(root.forward([&] {
      return net.run(root, net.input(0, step), order);
    })).backward();
    optimizer.step();
  }
}

Tensors whole_of(ShardedRoot& root, const Net& net) {
  Tensors whole;
  root.unshard();
  for (const at::Tensor& parameter : net.parameters()) {
    whole.push_back(parameter.detach().clone());
  }
  root.reshard(/*writes=*/false);
  return whole;
}

void expect_equal(const Tensors& found, const Tensors& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(at::equal(found[i], expected[i])) << "parameter " << i;
  }
}

class OptimizerStateTest : public ::testing::TestWithParam<OptimizerCase> {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::path(::testing::TempDir()) /
              ("brigade_optimizer_" + std::to_string(getpid()));
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string path() const { return folder_ / "model.safetensors"; }

  // Trains `steps` on 2 ranks, saves, and trains 3 more; what comes out of it.
  Tensors save_behind(int steps) {
    Tensors expected;
    run_ranks(2, [&](const Group& group) {
      Net net;
      ShardedRoot root(net.units(), group, {});
      const auto optimizer = GetParam().make(root.shards());
      train(root, net, *optimizer, 0, steps);
      save_whole(root, *optimizer, path(), {{"step", std::to_string(steps)}});
      train(root, net, *optimizer, steps, steps + 3);
      Tensors whole = whole_of(root, net);
      if (group->getRank() == 0) expected = std::move(whole);
    });
    return expected;
  }

 private:
  std::filesystem::path folder_;
};

struct Mesh {
  int num_ranks;
  int num_shards;
};

TEST_P(OptimizerStateTest, ResumesOnAnyMeshBitForBit) {
  const Tensors expected = save_behind(3);
  for (const Mesh mesh : {Mesh{1, 1}, Mesh{4, 4}, Mesh{4, 2}, Mesh{2, 1}}) {
    run_ranks(mesh.num_ranks, [&](const Group& group) {
      Net net({5, 7, 3, 6, 4}, /*seed=*/99);
      ShardedRoot root(net.units(), group, {.num_shards = mesh.num_shards});
      const auto optimizer = GetParam().make(root.shards());
      const SafetensorsMetadata metadata = load_whole(root, *optimizer, path());
      EXPECT_EQ(metadata.at("step"), "3");
      train(root, net, *optimizer, 3, 6);
      expect_equal(whole_of(root, net), expected);
    });
  }
}

// Three ranks average otherwise, so the state itself is compared.
TEST_P(OptimizerStateTest, ThreeRanksSaveWhatTheyLoad) {
  save_behind(3);
  const std::string again = path() + ".again";
  run_ranks(3, [&](const Group& group) {
    Net net({5, 7, 3, 6, 4}, /*seed=*/99);
    ShardedRoot root(net.units(), group, {});
    const auto optimizer = GetParam().make(root.shards());
    load_whole(root, *optimizer, path());
    save_whole(root, *optimizer, again, {{"step", "3"}});
  });
  EXPECT_FALSE(bytes_of_file(path()).empty());
  EXPECT_EQ(bytes_of_file(path()), bytes_of_file(again));
}

TEST_P(OptimizerStateTest, BeforeTheFirstStepOfAParameterItHasNoState) {
  const Tensors expected = save_behind(2);
  const auto reader = SafetensorsReader::open(path());
  ASSERT_TRUE(reader.ok()) << reader.status();
  const bool is_adagrad = GetParam().name == "Adagrad";
  for (const std::string& field : GetParam().fields) {
    EXPECT_NE(reader->find("blocks.2.weight." + field), nullptr) << field;
    EXPECT_EQ(reader->find("blocks.3.weight." + field) != nullptr, is_adagrad);
  }
  EXPECT_EQ(reader->find("blocks.2.weight.other"), nullptr);
  // An optimizer that has stepped, too, gets the state of the file.
  run_ranks(2, [&](const Group& group) {
    Net net({5, 7, 3, 6, 4}, /*seed=*/99);
    ShardedRoot root(net.units(), group, {});
    const auto optimizer = GetParam().make(root.shards());
    train(root, net, *optimizer, 0, 5);
    load_whole(root, *optimizer, path());
    train(root, net, *optimizer, 2, 5);
    expect_equal(whole_of(root, net), expected);
  });
}

// As a program that doesn't shard would.
TEST_P(OptimizerStateTest, TensorsHaveTheShapesOfTheParameters) {
  save_behind(3);
  const auto reader = SafetensorsReader::open(path());
  ASSERT_TRUE(reader.ok()) << reader.status();
  for (const std::string& field : GetParam().fields) {
    const SafetensorsEntry* const found =
        reader->find("blocks.1.weight." + field);
    ASSERT_NE(found, nullptr) << field;
    if (field == "step") {
      EXPECT_EQ(found->shape, std::vector<int64_t>{});
      EXPECT_EQ(found->dtype, SafetensorsDtype::kI64);
      int64_t step = 0;
      ASSERT_TRUE(reader
                      ->read(found->name, 0,
                             std::as_writable_bytes(std::span(&step, 1)))
                      .ok());
      EXPECT_EQ(step, 3);
    } else {
      EXPECT_EQ(found->shape, (std::vector<int64_t>{7, 3}));
    }
  }
}

// The same as train(), of a net that is not sharded.
void train(const Net& net, optim::Optimizer& optimizer, int from, int to) {
  for (int step = from; step < to; ++step) {
    optimizer.zero_grad();
    loss_of(net.run(net.input(0, step))).backward();
    optimizer.step();
  }
}

CheckpointedModel not_sharded(const Net& net, const Group& group) {
  std::vector<NamedParameter> parameters;
  for (const UnitSpec& unit : net.units()) {
    parameters.insert(parameters.end(), unit.parameters.begin(),
                      unit.parameters.end());
  }
  return CheckpointedModel(parameters, group);
}

// As data-parallel training's, where each rank has all.
TEST_P(OptimizerStateTest, AModelThatIsNotShardedResumesBitForBit) {
  const Tensors expected = save_behind(3);
  const std::string folder = path() + ".shards";
  run_ranks(3, [&](const Group& group) {
    Net net;
    ShardedRoot root(net.units(), group, {});
    const auto optimizer = GetParam().make(root.shards());
    load_whole(root, *optimizer, path());
    save_shards(root, *optimizer, folder, {{"step", "3"}});
  });
  for (const bool in_shards : {false, true}) {
    run_ranks(2, [&](const Group& group) {
      const Net net({5, 7, 3, 6, 4}, /*seed=*/99);
      const auto optimizer = GetParam().make(net.parameters());
      const CheckpointedModel model = not_sharded(net, group);
      const SafetensorsMetadata metadata =
          in_shards ? load_shards(model, *optimizer, folder)
                    : load_whole(model, *optimizer, path());
      EXPECT_EQ(metadata.at("step"), "3");
      train(net, *optimizer, 3, 6);
      expect_equal(net.parameters(), expected);
    });
  }
}

TEST_P(OptimizerStateTest, WhatAModelThatIsNotShardedSavesIsLoadedByOneThatIs) {
  Tensors expected;
  run_ranks(2, [&](const Group& group) {
    const Net net;
    const auto optimizer = GetParam().make(net.parameters());
    train(net, *optimizer, 0, 3);
    save_whole(not_sharded(net, group), *optimizer, path(), {{"step", "3"}});
    train(net, *optimizer, 3, 6);
    if (group->getRank() == 0) expected = net.parameters();
  });
  run_ranks(2, [&](const Group& group) {
    Net net({5, 7, 3, 6, 4}, /*seed=*/99);
    ShardedRoot root(net.units(), group, {});
    const auto optimizer = GetParam().make(root.shards());
    EXPECT_EQ(load_whole(root, *optimizer, path()).at("step"), "3");
    train(root, net, *optimizer, 3, 6);
    expect_equal(whole_of(root, net), expected);
  });
}

INSTANTIATE_TEST_SUITE_P(Optimizers, OptimizerStateTest,
                         ::testing::ValuesIn(all_cases()),
                         [](const auto& info) { return info.param.name; });

class OptimizerStateFailureTest : public OptimizerStateTest {
 protected:
  static OptimizerCase make_case(const std::string& name) {
    for (OptimizerCase& found : all_cases()) {
      if (found.name == name) return found;
    }
    return {};
  }

  // Saves with one optimizer, and loads with another, which has stepped: the
  // error, the same on both ranks, behind which nothing has changed.
  std::string error_of_loading(const std::string& saved,
                               const std::string& loaded) {
    std::string errors[2];
    run_ranks(2, [&](const Group& group) {
      Net net;
      ShardedRoot root(net.units(), group, {});
      const auto optimizer = make_case(saved).make(root.shards());
      train(root, net, *optimizer, 0, 3);
      save_whole(root, *optimizer, path());
    });
    run_ranks(2, [&](const Group& group) {
      Net net({5, 7, 3, 6, 4}, /*seed=*/99);
      ShardedRoot root(net.units(), group, {});
      const auto optimizer = make_case(loaded).make(root.shards());
      train(root, net, *optimizer, 0, 3);
      const std::string before = path() + ".before";
      const std::string after = path() + ".after";
      save_whole(root, *optimizer, before);
      errors[group->getRank()] =
          error_of([&] { load_whole(root, *optimizer, path()); });
      save_whole(root, *optimizer, after);
      if (group->getRank() == 0) expect_same_data(before, after);
    });
    EXPECT_EQ(errors[0], errors[1]);
    return errors[0];
  }

  static void expect_same_data(const std::string& left,
                               const std::string& right) {
    EXPECT_FALSE(bytes_of_file(left).empty());
    EXPECT_EQ(bytes_of_file(left), bytes_of_file(right));
  }
};

TEST_F(OptimizerStateFailureTest, AnotherOptimizersStateIsRefused) {
  EXPECT_THAT(error_of_loading("Adam", "AdamW"),
              HasSubstr("expected the state of AdamW, found that of 'Adam'"));
  EXPECT_THAT(error_of_loading("SgdMomentum", "RmsProp"),
              HasSubstr("expected the state of RMSprop, found that of 'SGD'"));
}

TEST_F(OptimizerStateFailureTest, OtherOptionsAreRefused) {
  EXPECT_THAT(error_of_loading("AdamW", "AdamWAmsgrad"),
              HasSubstr("has no tensor 'head.max_exp_avg_sq', which this AdamW "
                        "keeps"));
  EXPECT_THAT(error_of_loading("SgdMomentum", "Sgd"),
              HasSubstr("momentum_buffer', which this SGD does not keep"));
}

TEST_F(OptimizerStateFailureTest, AFileOfParametersHasNoState) {
  run_ranks(2, [&](const Group& group) {
    Net net;
    ShardedRoot root(net.units(), group, {});
    save_whole(root, path());
    optim::AdamW optimizer(root.shards(), 0.01);
    EXPECT_THAT(error_of([&] { load_whole(root, optimizer, path()); }),
                HasSubstr("found no optimizer's.\nLoad the parameters alone."));
    EXPECT_THAT(error_of([&] { load_whole(root, optimizer, path() + "!"); }),
                HasSubstr("model.safetensors!: cannot read it"));
  });
}

TEST_F(OptimizerStateFailureTest, OptimizersThatDoNotFitAreRefused) {
  run_ranks(2, [&](const Group& group) {
    Net net;
    ShardedRoot root(net.units(), group, {});
    optim::LBFGS lbfgs(root.shards());
    EXPECT_THAT(error_of([&] { save_whole(root, lbfgs, path()); }),
                HasSubstr("keeps its state by parameter"));
    Tensors others = root.shards();
    others[2] = torch::zeros(3);
    optim::AdamW strange(others, 0.01);
    EXPECT_THAT(
        error_of([&] { save_whole(root, strange, path()); }),
        HasSubstr("parameter 2 of the optimizer is none of this model"));
    // On one rank alone.
    const bool is_first = group->getRank() == 0;
    const auto one = is_first ? std::unique_ptr<optim::Optimizer>(
                                    new optim::AdamW(root.shards(), 0.01))
                              : std::unique_ptr<optim::Optimizer>(
                                    new optim::Adam(root.shards(), 0.01));
    EXPECT_THAT(error_of([&] { save_whole(root, *one, path()); }),
                HasSubstr("saved optimizer"));
    EXPECT_FALSE(std::filesystem::exists(path()));
  });
}

TEST_F(OptimizerStateFailureTest, RanksThatHoldAllFailAlike) {
  run_ranks(2, [&](const Group& group) {
    const Net net;
    optim::AdamW optimizer(net.parameters(), 0.01);
    const CheckpointedModel model = not_sharded(net, group);
    EXPECT_THAT(error_of([&] { save_shards(model, optimizer, path()); }),
                HasSubstr("expected a sharded model"));
    EXPECT_FALSE(std::filesystem::exists(path()));
    save_whole(model, optimizer, path());
    const std::string found = group->getRank() == 0 ? path() : path() + "!";
    EXPECT_THAT(error_of([&] { load_whole(model, optimizer, found); }),
                AllOf(HasSubstr("rank 1"), HasSubstr("cannot read it")));
    expect_equal(net.parameters(), Net().parameters());
  });
}

TEST_F(OptimizerStateFailureTest, OneProcessNeedsNoGroup) {
  torch::nn::Linear net(3, 2);
  net->weight.set_data(torch::ones({3, 2}).t());
  optim::AdamW optimizer(net->parameters(), 0.01);
  net(torch::ones({4, 3})).sum().backward();
  optimizer.step();
  save_whole(CheckpointedModel(*net), optimizer, path());
  const torch::nn::Linear other(3, 2);
  optim::AdamW other_optimizer(other->parameters(), 0.01);
  load_whole(CheckpointedModel(*other), other_optimizer, path());
  expect_equal(other->parameters(), net->parameters());
  other->weight.mutable_grad() = torch::ones({2, 3});
  net->weight.mutable_grad() = torch::ones({2, 3});
  net->bias.mutable_grad() = other->bias.mutable_grad() = torch::ones({2});
  optimizer.step();
  other_optimizer.step();
  expect_equal(other->parameters(), net->parameters());
}

// Counts of steps that differ between ranks would be lost.
TEST_F(OptimizerStateFailureTest, CountsThatDifferAreRefused) {
  run_ranks(2, [&](const Group& group) {
    Net net;
    ShardedRoot root(net.units(), group, {});
    optim::AdamW optimizer(root.shards(), 0.01);
    train(root, net, optimizer, 0, 3);
    if (group->getRank() == 1) optimizer.step();
    EXPECT_THAT(error_of([&] { save_whole(root, optimizer, path()); }),
                HasSubstr("head.step I64 of checksum"));
  });
}

}  // namespace optimizer_state_test
}  // namespace brigade
