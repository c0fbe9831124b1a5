#include "brigade/fsdp/fully_shard.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <algorithm>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Property;
using testing::run_ranks;
using ::testing::Throws;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

at::Tensor random(at::IntArrayRef sizes, uint64_t seed) {
  return torch::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(seed));
}

// Ranks are threads: parameters are written from generators of their own.
template <typename Holder>
Holder with_values(Holder module, uint64_t seed) {
  const torch::NoGradGuard no_grad;
  for (at::Tensor& parameter : module->parameters()) {
    parameter.copy_(random(parameter.sizes(), seed++).mul_(0.3));
  }
  return module;
}

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t size)
      : lin(register_module("lin", torch::nn::Linear(size, size))),
        gain(register_parameter("gain", torch::ones({size}))) {}
  at::Tensor forward(const at::Tensor& x, double slope = 1) {
    return x + torch::tanh(lin(x) * slope) * gain;
  }
  torch::nn::Linear lin;
  at::Tensor gain;

 protected:  // for a Sequential
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(1.0)})
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  NetImpl()
      : first(register_module("first", Sharded<Block>(Block(6)))),
        second(register_module("second", Sharded<Block>(Block(6)))),
        head(register_module("head", torch::nn::Linear(6, 2))) {}
  at::Tensor forward(const at::Tensor& x) {
    return head(second(first(x), 2.0));
  }
  Sharded<Block> first;
  Sharded<Block> second;
  torch::nn::Linear head;
};
TORCH_MODULE(Net);

TEST(FullyShardedTest, NamesAreTheModulesOwn) {
  Net net;
  const ModuleUnits units = units_of_module(*net);
  ASSERT_EQ(units.specs.size(), 3u);
  std::vector<std::string> names;
  for (const UnitSpec& spec : units.specs) {
    names.push_back(spec.name);
    for (const NamedParameter& parameter : spec.parameters) {
      names.push_back(parameter.name);
    }
  }
  EXPECT_THAT(names, ElementsAre("", "head.weight", "head.bias", "first",
                                 "first.gain", "first.lin.weight",
                                 "first.lin.bias", "second", "second.gain",
                                 "second.lin.weight", "second.lin.bias"));
  EXPECT_EQ(without_unit_levels("a.unit.my_unit.unit.weight"),
            "a.my_unit.weight");
}

// Each once; LibTorch lists a tied one where it is registered.
std::vector<at::Tensor> parameters_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> parameters;
  for (const at::Tensor& parameter : module.parameters()) {
    const bool is_known = std::ranges::any_of(
        parameters,
        [&](const at::Tensor& known) { return known.is_same(parameter); });
    if (!is_known) parameters.push_back(parameter);
  }
  return parameters;
}

// Against the same module without sharding, in one process.
template <typename Make>
void expect_same_training(const Make& make, int num_ranks,
                          const UnitChoice& choice = {}) {
  run_ranks(num_ranks, [&](const Group& group) {
    const int rank = group->getRank();
    auto plain = make();
    FullySharded model(make(), group, {}, choice);
    torch::optim::SGD plain_optimizer(parameters_of(*plain), 0.1);
    torch::optim::SGD optimizer(model.parameters(), 0.1);
    const auto input = [](int r, int step) {
      return random({3, 6}, 100 * step + r);
    };
    for (int step = 0; step < 4; ++step) {
      plain_optimizer.zero_grad();
      std::vector<at::Tensor> sums;
      for (int r = 0; r < num_ranks; ++r) {
        for (const at::Tensor& p : parameters_of(*plain)) {
          p.mutable_grad() = at::Tensor();
        }
        plain->forward(input(r, step)).square().sum().backward();
        size_t i = 0;
        for (const at::Tensor& p : parameters_of(*plain)) {
          if (r == 0) {
            sums.push_back(p.grad().clone());
          } else {
            sums[i] += p.grad();
          }
          ++i;
        }
      }
      size_t i = 0;
      for (const at::Tensor& p : parameters_of(*plain)) {
        p.mutable_grad() = sums[i++] * (1.0 / num_ranks);
      }
      plain_optimizer.step();
      optimizer.zero_grad();
      model(input(rank, step)).square().sum().backward();
      optimizer.step();
    }
    const auto whole = model.unsharded();
    const auto expected = plain->named_parameters();
    const auto found = model.module()->named_parameters();
    ASSERT_EQ(expected.size(), found.size());
    for (const auto& parameter : expected) {
      EXPECT_TRUE(at::equal(parameter.value(), found[parameter.key()]))
          << parameter.key();
    }
  });
}

TEST(FullyShardedTest, TrainsAModuleWithUnitsAsOneProcessDoes) {
  for (const int num_ranks : {1, 2, 3}) {
    expect_same_training([] { return with_values(Net(), 1); }, num_ranks);
  }
}

TEST(FullyShardedTest, TrainsASequentialWhoseChildrenAreUnits) {
  for (const int num_ranks : {1, 2}) {
    expect_same_training(
        [] {
          return with_values(
              torch::nn::Sequential(torch::nn::Linear(6, 8), torch::nn::Tanh(),
                                    torch::nn::Linear(8, 5), torch::nn::ReLU(),
                                    torch::nn::Linear(5, 2)),
              7);
        },
        num_ranks);
  }
}

std::vector<at::Tensor> copies_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> copies;
  for (const at::Tensor& tensor : tensors) {
    copies.push_back(tensor.detach().clone());
  }
  return copies;
}

TEST(FullyShardedTest, WhatIsWrittenWhileWholeIsTrainedOn) {
  run_ranks(2, [](const Group& group) {
    FullySharded model(with_values(Net(), 1), group);
    std::vector<at::Tensor> expected;
    {
      const auto whole = model.unsharded(/*writes=*/true);
      const torch::NoGradGuard no_grad;
      for (at::Tensor& parameter : model.module()->parameters()) {
        parameter.mul_(-2);
      }
      expected = copies_of(model.module()->parameters());
    }
    const torch::NoGradGuard no_grad;
    for (at::Tensor& shard : model.parameters()) shard.add_(1);
    const auto whole = model.unsharded();
    const std::vector<at::Tensor> found = model.module()->parameters();
    for (size_t i = 0; i < found.size(); ++i) {
      EXPECT_TRUE(at::equal(found[i], expected[i] + 1)) << i;
    }
  });
}

// The average of each rank's shards is that of whole parameters; evaluated
// with, and undone.
TEST(FullyShardedTest, EvaluatesWithAnAverageOfShards) {
  run_ranks(2, [](const Group& group) {
    FullySharded model(with_values(Net(), 1), group);
    Net other = with_values(Net(), 50);
    const at::Tensor x = random({3, 6}, 9);
    const torch::NoGradGuard no_grad;
    const std::vector<at::Tensor> before = copies_of(model.parameters());
    std::vector<at::Tensor> wholes;
    {
      const auto whole = model.unsharded(/*writes=*/true);
      wholes = copies_of(model.module()->parameters());
      const std::vector<at::Tensor> others = other->parameters();
      for (size_t i = 0; i < others.size(); ++i) {
        model.module()->parameters()[i].copy_(others[i]);
      }
    }
    std::vector<at::Tensor> shards = model.parameters();
    const std::vector<at::Tensor> trained = copies_of(shards);
    for (size_t i = 0; i < shards.size(); ++i) {
      shards[i].add_(before[i]).mul_(0.5);
    }
    const at::Tensor averaged = model(x);
    Net expected;
    for (size_t i = 0; i < wholes.size(); ++i) {
      expected->parameters()[i].copy_(
          (other->parameters()[i] + wholes[i]).mul_(0.5));
    }
    EXPECT_TRUE(at::equal(averaged, expected->forward(x)));
    for (size_t i = 0; i < shards.size(); ++i) shards[i].copy_(trained[i]);
    EXPECT_TRUE(at::equal(model(x), other->forward(x)));
  });
}

TEST(FullyShardedTest, IsExportedWhileWhole) {
  run_ranks(2, [](const Group& group) {
    FullySharded model(with_values(Net(), 1), group);
    std::stringstream archive;
    {
      const auto whole = model.unsharded();
      torch::save(model.module(), archive);
    }
    Net loaded;
    torch::load(loaded, archive);
    const at::Tensor x = random({3, 6}, 9);
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE(at::equal(loaded->forward(x), model(x)));
  });
}

torch::nn::Sequential make_layers() {
  return with_values(
      torch::nn::Sequential(torch::nn::Tanh(), torch::nn::Linear(6, 8),
                            torch::nn::ReLU(), torch::nn::Linear(8, 6),
                            Block(6), Block(6), torch::nn::Linear(6, 2)),
      7);
}

std::vector<std::string> units_of(const UnitChoice& choice) {
  std::vector<std::string> names;
  for (const UnitSpec& spec :
       units_of_sequential(*make_layers(), choice).specs) {
    names.push_back(spec.name);
  }
  return names;
}

TEST(UnitChoiceTest, ChildrenOfATypeBeginUnits) {
  EXPECT_THAT(units_of({}), ElementsAre("1", "3", "4", "5", "6"));
  EXPECT_THAT(units_of(unit_at_each<BlockImpl>()), ElementsAre("1", "4", "5"));
  expect_same_training(make_layers, 2, unit_at_each<BlockImpl>());
}

// They have 56, 54, 48, 48 and 14 elements.
TEST(UnitChoiceTest, ChildrenAreTogetherUntilTheyHaveSoManyElements) {
  EXPECT_THAT(units_of(units_of_numel(57)), ElementsAre("1", "4", "6"));
  EXPECT_THAT(units_of(units_of_numel(56)), ElementsAre("1", "3", "5"));
  EXPECT_THAT(units_of(units_of_numel(1'000)), ElementsAre("1"));
  expect_same_training(make_layers, 3, units_of_numel(57));
}

TEST(UnitChoiceTest, TiedChildrenMayBeOneUnit) {
  expect_same_training(
      [] {
        const torch::nn::Linear tied = with_values(torch::nn::Linear(6, 6), 3);
        return torch::nn::Sequential(tied, torch::nn::Tanh(), tied);
      },
      2, units_of_numel(1'000));
}

TEST(UnitChoiceTest, WhatIsIgnoredStaysAsItIs) {
  run_ranks(2, [&](const Group& group) {
    const int rank = group->getRank();
    Net net = with_values(Net(), 1);
    const at::Tensor gain = net->second->module()->gain;
    const at::Tensor before = gain.detach().clone();
    FullySharded model(net, group, {},
                       {.is_ignored = [](const std::string& name,
                                         const at::Tensor& parameter) {
                         return name == "second.gain";
                       }});
    EXPECT_EQ(model.parameters().size(), net->parameters().size() - 1);
    const at::Tensor x = random({3, 6}, 10 + rank);
    model(x).square().sum().backward();
    EXPECT_TRUE(at::equal(gain, before));

    Net alone = with_values(Net(), 1);
    alone(x).square().sum().backward();
    EXPECT_TRUE(at::equal(gain.grad(), alone->second->module()->gain.grad()));
  });
}

// `other` has the memory of `weight`.
struct ByMemoryImpl : torch::nn::Module {
  explicit ByMemoryImpl(bool is_buffer) {
    weight = register_parameter("weight", torch::ones({6}));
    if (is_buffer) {
      other = register_buffer("other", weight.detach());
    } else {
      other = register_parameter("other", weight.detach());
    }
  }
  at::Tensor forward(const at::Tensor& x) { return x * weight + other; }
  at::Tensor weight;
  at::Tensor other;
};
TORCH_MODULE(ByMemory);

TEST(UnitChoiceTest, WhatStaysAsItIsHasMemoryOfItsOwn) {
  run_ranks(2, [&](const Group& group) {
    const UnitChoice ignoring = {
        .is_ignored = [](const std::string& name, const at::Tensor&) {
          return name == "other";
        }};
    for (const bool is_buffer : {false, true}) {
      EXPECT_THAT(
          [&] {
            const FullySharded model(ByMemory(is_buffer), group, {}, ignoring);
          },
          Throws<c10::ValueError>(
              Property(&c10::Error::what_without_backtrace,
                       AllOf(HasSubstr(is_buffer ? "buffer 'other'"
                                                 : "ignored parameter 'other'"),
                             HasSubstr("parameter 'weight'")))));
    }
  });
}

std::vector<std::string> units_of_net(const UnitChoice& choice) {
  std::vector<std::string> names;
  for (const UnitSpec& spec : units_of_module(*Net(), choice).specs) {
    names.push_back(spec.name);
  }
  return names;
}

UnitChoice unit_at(const std::string& name) {
  return {.begins_unit = [name](const UnitCandidate& candidate) {
    return candidate.name == name;
  }};
}

// Those have 48 elements each.
TEST(UnitChoiceTest, OfWhatShardedHoldsARuleMakesUnits) {
  EXPECT_THAT(units_of_net({}), ElementsAre("", "first", "second"));
  EXPECT_THAT(units_of_net(unit_at_each<BlockImpl>()),
              ElementsAre("", "first", "second"));
  EXPECT_THAT(units_of_net(unit_at("second")), ElementsAre("", "second"));
  EXPECT_THAT(units_of_net(units_of_numel(48)),
              ElementsAre("", "first", "second"));
  EXPECT_THAT(units_of_net(units_of_numel(49)), ElementsAre(""));
  for (const UnitChoice& choice : {unit_at("second"), units_of_numel(49)}) {
    expect_same_training([] { return with_values(Net(), 1); }, 2, choice);
  }
}

TEST(UnitChoiceTest, WhatIsIgnoredDoesNotMakeAModuleLarger) {
  UnitChoice choice = units_of_numel(48);
  choice.is_ignored = [](const std::string& name, const at::Tensor&) {
    return name == "first.gain";
  };
  EXPECT_THAT(units_of_net(choice), ElementsAre("", "second"));
}

TEST(UnitChoiceTest, ModulesThatTellNobodyThatTheyRunAreErrors) {
  for (const char* name : {"head", "first.lin"}) {
    EXPECT_THAT(
        [&] { units_of_net(unit_at(name)); },
        Throws<c10::ValueError>(Property(
            &c10::Error::what_without_backtrace,
            AllOf(HasSubstr(absl::StrCat("'", name, "'")),
                  HasSubstr("LinearImpl"), HasSubstr("brigade::Sharded")))));
  }
  const UnitChoice linear = unit_at_each<torch::nn::LinearImpl>();
  EXPECT_THAT([&] { units_of(linear); },
              Throws<c10::ValueError>(Property(
                  &c10::Error::what_without_backtrace,
                  AllOf(HasSubstr("'4'"), HasSubstr("'lin'"),
                        HasSubstr("LinearImpl"), HasSubstr("Sharded")))));
  const torch::nn::Sequential nested{Net(), torch::nn::Linear(2, 2)};
  EXPECT_THAT([&] { units_of_sequential(*nested); },
              Throws<c10::ValueError>(
                  Property(&c10::Error::what_without_backtrace,
                           AllOf(HasSubstr("'0'"), HasSubstr("'first'")))));
}

// One tensor that two units use belongs to the outermost one.
struct TiedImpl : torch::nn::Module {
  struct PartImpl : torch::nn::Module {
    explicit PartImpl(const at::Tensor& shared)
        : weight(register_parameter("weight", shared)),
          bias(register_parameter("bias", torch::zeros({6}))) {}
    at::Tensor forward(const at::Tensor& x) {
      return torch::tanh(torch::matmul(x, weight) + bias);
    }
    at::Tensor weight;
    at::Tensor bias;
  };
  TORCH_MODULE(Part);

  TiedImpl() {
    const at::Tensor shared = torch::ones({6, 6});
    in = register_module("in", Sharded<Part>(Part(shared)));
    out = register_module("out", Sharded<Part>(Part(shared)));
  }
  at::Tensor forward(const at::Tensor& x) { return out(in(x)); }
  Sharded<Part> in = nullptr;
  Sharded<Part> out = nullptr;
};
TORCH_MODULE(Tied);

TEST(FullyShardedTest, TiedParametersStayTied) {
  Tied tied;
  const ModuleUnits units = units_of_module(*tied);
  ASSERT_EQ(units.specs.size(), 3u);
  EXPECT_EQ(units.specs[0].parameters.size(), 1u);
  EXPECT_EQ(units.specs[0].parameters[0].name, "in.weight");
  expect_same_training([] { return with_values(Tied(), 3); }, 2);
}

// Norms of all blocks, in one unit.
struct NormedBlockImpl : torch::nn::Module {
  explicit NormedBlockImpl(int64_t size)
      : norm(register_module(
            "norm",
            Sharded<torch::nn::LayerNorm>(
                torch::nn::LayerNorm(torch::nn::LayerNormOptions({size})),
                "norms"))),
        lin(register_module("lin", torch::nn::Linear(size, size))) {}
  at::Tensor forward(const at::Tensor& x) {
    return x + torch::tanh(lin(norm(x)));
  }
  Sharded<torch::nn::LayerNorm> norm;
  torch::nn::Linear lin;
};
TORCH_MODULE(NormedBlock);

struct NormedNetImpl : torch::nn::Module {
  NormedNetImpl()
      : first(register_module("first", Sharded<NormedBlock>(NormedBlock(6)))),
        second(register_module("second", Sharded<NormedBlock>(NormedBlock(6)))),
        third(register_module("third", Sharded<NormedBlock>(NormedBlock(6)))),
        norm(register_module(
            "norm", Sharded<torch::nn::LayerNorm>(
                        torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})),
                        "norms"))),
        head(register_module("head", torch::nn::Linear(6, 2))) {}
  at::Tensor forward(const at::Tensor& x) {
    return head(norm(third(second(first(x)))));
  }
  Sharded<NormedBlock> first;
  Sharded<NormedBlock> second;
  Sharded<NormedBlock> third;
  Sharded<torch::nn::LayerNorm> norm;
  torch::nn::Linear head;
};
TORCH_MODULE(NormedNet);

TEST(FullyShardedTest, NormsMayBeOneUnit) {
  NormedNet net;
  const ModuleUnits units = units_of_module(*net);
  std::vector<std::string> names;
  for (const UnitSpec& spec : units.specs) {
    names.push_back(spec.name);
    EXPECT_EQ(spec.spans_passes, spec.name == "norms");
  }
  EXPECT_THAT(names, ElementsAre("", "norms", "first", "second", "third"));
  EXPECT_EQ(units.specs[1].parameters.size(), 8u);
  EXPECT_EQ(units.specs[1].parameters[2].name, "second.norm.weight");
  for (const int num_ranks : {1, 2, 3}) {
    expect_same_training([] { return with_values(NormedNet(), 5); }, num_ranks);
  }
}

TEST(FullyShardedTest, AUnitOfNormsIsGatheredOnceAndReducedOnce) {
  run_ranks(2, [&](const Group& group) {
    FullySharded model(with_values(NormedNet(), 5), group);
    ShardedRoot& root = model.root();
    const auto bytes_of = [&](size_t first, size_t end) {
      int64_t bytes = 0;
      for (size_t unit = first; unit < end; ++unit) {
        bytes += root.unit(unit).segments[0]->whole_bytes();
      }
      return bytes;
    };
    const int64_t kept = bytes_of(0, 2);  // the outermost one, and the norms
    const int64_t blocks = bytes_of(2, 5);
    for (int step = 0; step < 4; ++step) {
      const ShardingStatistics before = root.statistics();
      const int64_t launched = root.engine_statistics().units_launched;
      model(random({3, 6}, step)).square().sum().backward();
      ShardingStatistics after = root.statistics();
      EXPECT_EQ(after.sent_by_gathers - before.sent_by_gathers,
                kept / 2 + 2 * (blocks / 2));
      EXPECT_EQ(after.sent_by_sums - before.sent_by_sums, (kept + blocks) / 2);
      EXPECT_EQ(root.engine_statistics().units_launched - launched, 5);
      {
        const torch::NoGradGuard no_grad;
        model(random({3, 6}, step));
      }
      // What was whole in backward, or is still there, was sharded again.
      EXPECT_EQ(root.statistics().sent_by_gathers - after.sent_by_gathers,
                (kept + blocks) / 2);
    }
    const ShardingStatistics statistics = root.statistics();
    EXPECT_EQ(statistics.late_gathers, 0);
    EXPECT_EQ(statistics.unplanned, 0);
    EXPECT_EQ(statistics.peak_whole_bytes, statistics.planned_bytes);
  });
}

// Behind forward, which is when they are released, too.
TEST(FullyShardedTest, AUnitOfNormsMayStayInSlices) {
  run_ranks(4, [&](const Group& group) {
    FullySharded model(with_values(NormedNet(), 5), group, {.reshards_to = 2});
    ShardedRoot& root = model.root();
    EXPECT_FALSE(root.settings(1).keeps_slices());
    root.settings(1).reshards_after_forward = true;
    for (int step = 0; step < 3; ++step) {
      model(random({3, 6}, step)).square().sum().backward();
      // The norms' and the blocks', each once.
      EXPECT_EQ(root.statistics().near_gathers, 4 * (step + 1));
    }
    const ShardingStatistics statistics = root.statistics();
    EXPECT_EQ(statistics.late_gathers, 0);
    EXPECT_EQ(statistics.unplanned, 0);
    EXPECT_EQ(statistics.whole_bytes, statistics.planned_bytes);

    NormedNet net;
    std::vector<UnitSpec> specs = units_of_module(*net).specs;
    specs[1].reshards_to = 2;
    ShardedRoot told(specs, group, {});
    EXPECT_TRUE(told.settings(1).keeps_slices());
  });
}

}  // namespace
}  // namespace brigade
