// Choice of units, and training of modules of any type with the bits of one
// process.

#include "brigade/fsdp/fully_shard.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "brigade/comm/process_group.h"
#include "brigade/fsdp/segmented_model.h"
#include "brigade/tests/support/failing_allocator.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace fully_shard_test {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;
using ::testing::Property;
using testing::run_ranks;
using ::testing::Throws;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

at::Tensor random(at::IntArrayRef sizes, uint64_t seed) {
  return torch::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(seed));
}

// Initializes from separate generators, since ranks are threads.
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
    if (writes) {
      const torch::NoGradGuard no_grad;
      lin->weight.clamp_(-1, 1);
    }
    return x + torch::tanh(lin(x) * slope) * gain;
  }
  torch::nn::Linear lin;
  at::Tensor gain;
  bool writes = false;

 protected:  // for a Sequential
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(1.0)})
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  NetImpl()
      : first(register_module("first", Block(6))),
        second(register_module("second", Block(6))),
        head(register_module("head", torch::nn::Linear(6, 2))) {}
  at::Tensor forward(const at::Tensor& x) {
    return head(second(first(x), 2.0));
  }
  Block first;
  Block second;
  torch::nn::Linear head;
};
TORCH_MODULE(Net);

// Returns each parameter once; LibTorch lists tied ones repeatedly.
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

// Returns the sum of residual and gradient in coarse steps, and sets the
// residual to the rest.
at::Tensor compensated(const at::Tensor& gradient, at::Tensor& residual) {
  if (!residual.defined()) residual = at::zeros_like(gradient);
  residual = residual + gradient;
  const at::Tensor sent = (residual * 4).round() / 4;
  residual = residual - sent;
  return sent;
}

struct ErrorFeedbackHook : ReductionHook {
  FuturePtr reduce(const Reduction& reduction) override {
    reduction.whole.copy_(
        compensated(reduction.whole, residuals[reduction.index]));
    return reduction.sum(reduction.whole, reduction.shard);
  }
  std::string hook_name() const override { return "error feedback"; }
  std::map<size_t, at::Tensor> residuals;  // by unit
};

struct TrainingOptions {
  bool makes_optimizer_first = false;  // before fully_shard()
  bool has_error_feedback = false;     // in one process: by parameter
};

// Expects the bits of the same module trained unsharded in one process.
template <typename Make>
void expect_same_training(const Make& make, int num_ranks,
                          const UnitSelection& selection = {},
                          const TrainingOptions& training = {}) {
  run_ranks(num_ranks, [&](const Group& group) {
    auto plain = make();
    auto net = make();
    const auto make_optimizer = [](auto& of) {
      return torch::optim::SGD(parameters_of(*of),
                               torch::optim::SGDOptions(0.1).momentum(0.9));
    };
    torch::optim::SGD plain_optimizer = make_optimizer(plain);
    std::optional<torch::optim::SGD> optimizer;
    if (training.makes_optimizer_first) optimizer = make_optimizer(net);
    FullyShardOptions options;
    if (training.has_error_feedback) {
      options.comm_hook = std::make_shared<ErrorFeedbackHook>();
    }
    const auto model = fully_shard(*net, group, options, selection);
    if (!optimizer) optimizer = make_optimizer(net);
    const std::vector<at::Tensor> parameters = parameters_of(*plain);
    std::map<std::pair<int, size_t>, at::Tensor> residuals;
    const auto loss_of = [](auto& module, int rank, int step) {
      return module->forward(random({3, 6}, 100 * step + rank)).square().sum();
    };
    for (int step = 0; step < 4; ++step) {
      std::vector<at::Tensor> sums(parameters.size());
      for (int rank = 0; rank < num_ranks; ++rank) {
        plain_optimizer.zero_grad();
        loss_of(plain, rank, step).backward();
        for (size_t i = 0; i < parameters.size(); ++i) {
          at::Tensor sent = parameters[i].grad();
          if (training.has_error_feedback) {
            sent = compensated(sent, residuals[{rank, i}]);
          }
          sums[i] = rank == 0 ? sent : sums[i] + sent;
        }
      }
      for (size_t i = 0; i < parameters.size(); ++i) {
        parameters[i].mutable_grad() = sums[i] * (1.0 / num_ranks);
      }
      plain_optimizer.step();
      optimizer->zero_grad();
      model->forward([&] { return loss_of(net, group->getRank(), step); })
          .backward();
      optimizer->step();
    }
    const auto unsharded = model->unsharded();
    const auto expected = plain->named_parameters();
    const auto found = net->named_parameters();
    ASSERT_EQ(expected.size(), found.size());
    for (const auto& parameter : expected) {
      EXPECT_TRUE(at::equal(parameter.value(), found[parameter.key()]))
          << parameter.key();
    }
  });
}

std::vector<std::string> units_of(const torch::nn::Module& module,
                                  const UnitSelection& selection = {}) {
  std::vector<std::string> names;
  run_ranks(1, [&](const Group& group) {
    const auto model = fully_shard(module, group, {}, selection);
    names = model->unit_names();
  });
  return names;
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

TEST(FullyShardTest, ChildrenAreUnits) {
  EXPECT_THAT(units_of(*Net()), ElementsAre("first", "second", "head"));
  for (const int num_ranks : {1, 2, 3}) {
    expect_same_training([] { return with_values(Net(), 1); }, num_ranks);
  }
}

torch::nn::Sequential make_layers() {
  return with_values(
      torch::nn::Sequential(torch::nn::Tanh(), torch::nn::Linear(6, 8),
                            torch::nn::ReLU(), torch::nn::Linear(8, 6),
                            Block(6), Block(6), torch::nn::Linear(6, 2)),
      7);
}

TEST(FullyShardTest, ChildrenOfListsAreUnits) {
  EXPECT_THAT(units_of(*make_layers()), ElementsAre("1", "3", "4", "5", "6"));
  expect_same_training(make_layers, 2);
  struct WithListImpl : torch::nn::Module {
    WithListImpl() {
      register_module("blocks", torch::nn::ModuleList(Block(2), Block(2)));
      register_module("head", torch::nn::Linear(2, 2));
    }
  };
  EXPECT_THAT(units_of(WithListImpl()),
              ElementsAre("", "blocks.0", "blocks.1"));
}

TEST(FullyShardTest, ModulesOfATypeAreUnits) {
  EXPECT_THAT(units_of(*make_layers(), each_is_unit<BlockImpl>()),
              ElementsAre("", "4", "5"));
  expect_same_training(make_layers, 2, each_is_unit<BlockImpl>());
  // Units may be nested.
  const UnitSelection linears = each_is_unit<torch::nn::LinearImpl>();
  EXPECT_THAT(units_of(*Net(), linears),
              ElementsAre("", "first.lin", "second.lin", "head"));
  expect_same_training([] { return with_values(Net(), 1); }, 3, linears);
  const UnitSelection both = each_is_unit<torch::nn::LinearImpl, BlockImpl>();
  EXPECT_THAT(
      units_of(*Net(), both),
      ElementsAre("first", "first.lin", "second", "second.lin", "head"));
  expect_same_training([] { return with_values(Net(), 1); }, 2, both);
}

// The layers have 56, 54, 48, 48 and 14 elements.
TEST(FullyShardTest, UnitsOfSizeHaveAtLeastThatManyElements) {
  EXPECT_THAT(units_of(*make_layers(), units_of_size(50)),
              ElementsAre("", "1", "3"));
  EXPECT_THAT(units_of(*Net(), units_of_size(42)),  // lin has 42
              ElementsAre("", "first.lin", "second.lin"));
  EXPECT_THAT(units_of(*Net(), units_of_size(43)),
              ElementsAre("", "first", "second"));
  EXPECT_THAT(units_of(*Net(), units_of_size(1'000)), ElementsAre(""));
  expect_same_training(make_layers, 3, units_of_size(50));
  expect_same_training(make_layers, 2, units_of_size(1'000));
}

TEST(FullyShardTest, TiedParametersStayTied) {
  const auto make = [] {
    const torch::nn::Linear tied = with_values(torch::nn::Linear(6, 6), 3);
    return torch::nn::Sequential(tied, torch::nn::Tanh(), tied);
  };
  EXPECT_THAT(units_of(*make()), ElementsAre(""));
  expect_same_training(make, 2);
}

TEST(FullyShardTest, TheRootUnitIsGatheredOnceAndReducedOnce) {
  run_ranks(2, [](const Group& group) {
    Net net = with_values(Net(), 1);
    const auto model =
        fully_shard(*net, group, {}, each_is_unit<torch::nn::LinearImpl>());
    int64_t all = 0;
    int64_t root = 0;
    for (const ShardedUnit& unit :
         dynamic_cast<SegmentedModel&>(*model).units()) {
      all += unit.whole_bytes();
      if (unit.name.empty()) root += unit.whole_bytes();
    }
    for (int number = 0; number < 4; ++number) {
      const ShardedModelStatistics before = model->statistics();
      const at::Tensor x = random({3, 6}, number).requires_grad_();
      model->forward([&] { return net(x); }).square().sum().backward();
      const ShardedModelStatistics after = model->statistics();
      EXPECT_EQ(after.all_gathers - before.all_gathers, 4 + 3);
      EXPECT_LE(after.sent_by_gathers - before.sent_by_gathers,
                root / 2 + 2 * (all - root) / 2);
      EXPECT_LE(after.sent_by_sums - before.sent_by_sums, all / 2);
      if (number < 2) continue;  // no recorded schedule yet
      EXPECT_EQ(after.learned_segments, before.learned_segments);
      EXPECT_EQ(after.rounds, before.rounds);
    }
  });
}

TEST(FullyShardTest, ASparseGradientIsAnErrorThatNamesTheParameter) {
  run_ranks(2, [](const Group& group) {
    torch::nn::Embedding net(torch::nn::EmbeddingOptions(4, 2).sparse(true));
    const auto model = fully_shard(*net, group);
    for (const bool is_sparse : {true, false}) {
      net->options.sparse(is_sparse);
      const at::Tensor loss =
          model->forward([&] { return net(torch::arange(2)); }).sum();
      if (!is_sparse) {
        loss.backward();
        continue;
      }
      try {
        loss.backward();
        ADD_FAILURE() << "no error";
      } catch (const c10::Error& error) {
        EXPECT_THAT(error.what_without_backtrace(),
                    HasSubstr("a dense gradient of parameter 'weight', found a "
                              "sparse one"));
      }
    }
  });
}

TEST(FullyShardTest, IgnoredParametersAreNeitherShardedNorReduced) {
  run_ranks(2, [&](const Group& group) {
    const int rank = group->getRank();
    Net net = with_values(Net(), 1);
    const at::Tensor before = net->second->gain.detach().clone();
    const auto model = fully_shard(
        *net, group, {},
        {.is_ignored = [](const std::string& name, const at::Tensor&) {
          return name == "second.gain";
        }});
    const at::Tensor x = random({3, 6}, 10 + rank);
    model->forward([&] { return net(x); }).square().sum().backward();
    EXPECT_TRUE(at::equal(net->second->gain, before));
    Net alone = with_values(Net(), 1);
    alone(x).square().sum().backward();
    EXPECT_TRUE(
        at::equal(net->second->gain.grad(), alone->second->gain.grad()));
  });
}

// `other` shares memory with `weight`.
struct SharedMemoryImpl : torch::nn::Module {
  explicit SharedMemoryImpl(bool is_buffer) {
    const at::Tensor weight = register_parameter("weight", torch::ones({6}));
    if (is_buffer) {
      register_buffer("other", weight.detach());
    } else {
      register_parameter("other", weight.detach());
    }
  }
};

TEST(FullyShardTest, UnshardedTensorsMustNotShareMemoryWithShardedOnes) {
  run_ranks(2, [&](const Group& group) {
    const UnitSelection ignoring = {
        .is_ignored = [](const std::string& name, const at::Tensor&) {
          return name == "other";
        }};
    for (const bool is_buffer : {false, true}) {
      const SharedMemoryImpl module(is_buffer);
      EXPECT_THAT([&] { fully_shard(module, group, {}, ignoring); },
                  Throws<c10::ValueError>(Property(
                      &c10::Error::what_without_backtrace,
                      AllOf(HasSubstr(is_buffer ? "buffer 'other'"
                                                : "ignored parameter 'other'"),
                            HasSubstr("parameter 'weight'")))));
    }
  });
}

TEST(FullyShardTest, TorchScriptModulesAreSharded) {
  run_ranks(2, [](const Group& group) {
    const auto make = [] {
      torch::jit::Module inner("Inner");
      inner.register_parameter(
          "weight", random({6, 6}, 1).mul_(0.3).requires_grad_(), false);
      inner.define(
          "def forward(self, x):\n  return torch.tanh(x @ self.weight)\n");
      torch::jit::Module outer("Outer");
      outer.register_module("inner", inner);
      outer.register_parameter("scale", torch::ones({6}).requires_grad_(),
                               false);
      outer.define(
          "def forward(self, x):\n  return self.inner.forward(x) * "
          "self.scale\n");
      return outer;
    };
    torch::jit::Module plain = make();
    torch::jit::Module net = make();
    const auto model = fully_shard(net, group);
    ASSERT_EQ(model->unit_names().size(), 2u);
    EXPECT_EQ(model->unit_names()[1], "inner");
    const at::Tensor x = random({3, 6}, 2);  // the same on both ranks
    for (int step = 0; step < 4; ++step) {
      plain.forward({x}).toTensor().square().sum().backward();
      model->forward([&] { return net.forward({x}).toTensor(); })
          .square()
          .sum()
          .backward();
    }
    const auto expected = plain.named_parameters();
    auto other = expected.begin();
    for (const auto& parameter : net.named_parameters()) {
      EXPECT_TRUE(at::equal(gather_whole(parameter.value.grad()),
                            (*other).value.grad()))
          << parameter.name;
      ++other;
    }
  });
}

TEST(FullyShardTest, OptimizersMadeBeforeItTrainTheShards) {
  expect_same_training([] { return with_values(Net(), 1); }, 2, {},
                       {.makes_optimizer_first = true});
}

TEST(FullyShardTest, ErrorFeedbackHooksTrainAsInOneProcess) {
  expect_same_training([] { return with_values(Net(), 1); }, 3, {},
                       {.has_error_feedback = true});
}

// ---- Programs.

TEST(FullyShardTest, WritesCountIfTheirScopeEndsWithoutAnError) {
  run_ranks(2, [](const Group& group) {
    Net net = with_values(Net(), 1);
    Net expected = with_values(Net(), 1);
    const auto model = fully_shard(*net, group);
    const torch::NoGradGuard no_grad;
    {
      const auto unsharded = model->unsharded();
      EXPECT_TRUE(at::equal(net->head->weight, expected->head->weight));
      EXPECT_ANY_THROW(net->head->weight.fill_(1));
    }
    {
      const auto unsharded = model->unsharded(/*may_write=*/true);
      for (at::Tensor& parameter : net->parameters()) parameter.mul_(-2);
    }
    EXPECT_THROW(
        {
          const auto unsharded = model->unsharded(/*may_write=*/true);
          net->head->weight.zero_();
          throw std::runtime_error("stop");
        },
        std::runtime_error);
    for (at::Tensor& parameter : net->parameters()) parameter.add_(1);
    for (at::Tensor& parameter : expected->parameters()) {
      parameter.mul_(-2).add_(1);
    }
    const at::Tensor x = random({3, 6}, 9);
    EXPECT_TRUE(at::equal(model->forward([&] { return net(x); }), expected(x)));
  });
}

TEST(FullyShardTest, ScopesOfUnshardedParametersNest) {
  run_ranks(2, [](const Group& group) {
    const torch::NoGradGuard no_grad;
    torch::nn::Linear net(4, 2);
    const auto model = fully_shard(*net, group);
    const at::Tensor first = model->forward([&] { return net(torch::eye(4)); });
    {
      const auto outer = model->unsharded(/*may_write=*/true);
      net->weight.mul_(2);
      try {
        const auto inner = model->unsharded();
        throw std::logic_error("evaluation failed");
      } catch (const std::logic_error&) {
      }
      net->bias.mul_(2);
    }
    EXPECT_TRUE(at::equal(model->forward([&] { return net(torch::eye(4)); }),
                          2 * first));
    EXPECT_EQ(model->unshard({0}), std::vector<size_t>({0}));
    { const auto scope = model->unsharded(); }
    EXPECT_THAT(model->unshard({0}), ::testing::IsEmpty());
    EXPECT_THAT(error_of([&] { model->unshard({0}, /*may_write=*/true); }),
                HasSubstr("unsharded with writes, found it unsharded without"));
    model->reshard({0});
    EXPECT_THAT(error_of([&] { model->reshard({7}); }),
                HasSubstr("a unit below 1, found 7"));
    EXPECT_THAT(error_of([&] { model->settings(7); }),
                HasSubstr("a unit below 1, found 7"));
  });
}

TEST(FullyShardTest, AModuleIsSavedAndLoadedWhileUnsharded) {
  run_ranks(2, [](const Group& group) {
    Net net = with_values(Net(), 1);
    const auto model = fully_shard(*net, group);
    std::stringstream archive;
    {
      const auto unsharded = model->unsharded();
      torch::save(net, archive);
      EXPECT_THAT(error_of([&] { checkpoint_model(*model); }),
                  HasSubstr("of sharded parameters, found them unsharded"));
    }
    EXPECT_EQ(checkpoint_model(*model).tensors.size(),
              net->parameters().size());
    Net loaded;
    torch::load(loaded, archive);
    const at::Tensor x = random({3, 6}, 9);
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE(
        at::equal(loaded->forward(x), model->forward([&] { return net(x); })));
    for (at::Tensor& parameter : loaded->parameters()) parameter.mul_(2);
    std::stringstream doubled;
    torch::save(loaded, doubled);
    {
      const auto unsharded = model->unsharded(/*may_write=*/true);
      torch::load(net, doubled);
    }
    EXPECT_TRUE(
        at::equal(loaded->forward(x), model->forward([&] { return net(x); })));
  });
}

struct Strategy {
  std::string name;
  FullyShardOptions options;
  void (*change)(ShardedModel&) = [](ShardedModel&) {};
};

TEST(FullyShardTest, EveryStrategyTrainsAndEvaluates) {
  const std::vector<Strategy> strategies = {
      {"all", {}},
      {"gradients", {.reshard_after_forward = false}},
      {"optimizer state", {}, shard_optimizer_state},
      {"no prefetch", {.prefetch_depth = 0}},
      {"far prefetch", {.prefetch_depth = 3}, [](ShardedModel& model) {
         model.set_max_reducing(1);
       }}};
  for (const Strategy& strategy : strategies) {
    for (const bool sets_to_none : {true, false}) {
      SCOPED_TRACE(strategy.name);
      run_ranks(2, [&](const Group& group) {
        Net plain = with_values(Net(), 1);
        Net net = with_values(Net(), 1);
        const auto model = fully_shard(*net, group, strategy.options);
        strategy.change(*model);
        torch::optim::SGD expected(plain->parameters(), 0.05);
        torch::optim::SGD found(net->parameters(), 0.05);
        for (int s = 0; s < 4; ++s) {
          const at::Tensor x = random({3, 6}, static_cast<uint64_t>(s));
          expected.zero_grad(sets_to_none);
          found.zero_grad(sets_to_none);
          const at::Tensor loss = plain(x).square().sum();
          loss.backward();
          const at::Tensor own =
              model->forward([&] { return net(x); }).square().sum();
          own.backward();
          EXPECT_EQ(own.item<double>(), loss.item<double>()) << "step " << s;
          expected.step();
          found.step();
          const torch::NoGradGuard no_grad;
          EXPECT_TRUE(
              at::equal(model->forward([&] { return net(x); }), plain(x)));
        }
      });
    }
  }
}

TEST(FullyShardTest, ModulesAreConvertedBetweenSteps) {
  run_ranks(2, [](const Group& group) {
    Net plain = with_values(Net(), 1);
    Net net = with_values(Net(), 1);
    const auto model = fully_shard(*net, group);
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kFloat}) {
      plain->to(dtype);
      net->to(dtype);
      plain->zero_grad();
      net->zero_grad();
      const at::Tensor x = random({3, 6}, 3).to(dtype);
      plain(x).square().sum().backward();
      model->forward([&] { return net(x); }).square().sum().backward();
      const at::Tensor found = gather_whole(net->head->weight.grad());
      EXPECT_EQ(found.scalar_type(), dtype);
      EXPECT_TRUE(at::equal(found, plain->head->weight.grad()));
    }
  });
}

TEST(FullyShardTest, NormsAndClippingAreGlobal) {
  run_ranks(2, [](const Group& group) {
    Net plain = with_values(Net(), 1);
    Net net = with_values(Net(), 1);
    const auto model = fully_shard(*net, group);
    const at::Tensor x = random({3, 6}, 1);
    plain(x).square().sum().backward();
    model->forward([&] { return net(x); }).square().sum().backward();
    const double expected =
        torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.01);
    EXPECT_NEAR(model->clip_grad_norm(1e9), expected, 1e-6);
    EXPECT_NEAR(torch::nn::utils::clip_grad_norm_(net->parameters(), 0.01),
                expected, 1e-6);
    EXPECT_TRUE(torch::allclose(gather_whole(net->head->weight.grad()),
                                plain->head->weight.grad(), 1e-5, 1e-7));
  });
}

struct NamingHook : ReductionHook {
  FuturePtr reduce(const Reduction& reduction) override {
    names[reduction.index] = reduction.unit;
    return reduction.sum(reduction.whole, reduction.shard);
  }
  std::string hook_name() const override { return "naming"; }
  std::map<size_t, std::string> names;
};

// So that hooks keep state by unit: two of these units have one size.
TEST(FullyShardTest, HooksGetTheirUnit) {
  run_ranks(2, [](const Group& group) {
    Net net = with_values(Net(), 1);
    const auto hook = std::make_shared<NamingHook>();
    const auto model = fully_shard(*net, group, {.comm_hook = hook});
    model->forward([&] { return net(random({3, 6}, 1)); }).sum().backward();
    EXPECT_THAT(hook->names, ElementsAre(Pair(0, "first"), Pair(1, "second"),
                                         Pair(2, "head")));
  });
}

TEST(FullyShardTest, ViewsWorkAndGradientsOfInputsLeaveGradUndefined) {
  run_ranks(2, [](const Group& group) {
    Net plain = with_values(Net(), 1);
    Net net = with_values(Net(), 1);
    const auto model = fully_shard(*net, group);
    for (int step = 0; step < 3; ++step) {
      const at::Tensor x = random({3, 6}, step).requires_grad_();
      const auto loss_of = [&](Net& of) {
        const at::Tensor view = of->first->lin->weight.t();
        const at::Tensor y = of->second(of->first(x)).matmul(view);
        return of->head(y).square().sum();
      };
      const at::Tensor expected = loss_of(plain);
      const at::Tensor found = model->forward([&] { return loss_of(net); });
      EXPECT_TRUE(
          at::equal(torch::autograd::grad({found}, {x}, {}, true)[0],
                    torch::autograd::grad({expected}, {x}, {}, true)[0]));
      EXPECT_EQ(net->first->gain.grad().defined(), step > 0);
      expected.backward();
      found.backward();
      EXPECT_TRUE(at::equal(gather_whole(net->first->lin->weight.grad()),
                            plain->first->lin->weight.grad()));
    }
  });
}

struct ScaleImpl : torch::nn::Module {
  at::Tensor weight = register_parameter("weight", torch::full({3}, 2.0F));
};

TEST(FullyShardTest, NestsOfInputsAndOutputsAreCast) {
  run_ranks(2, [](const Group& group) {
    ScaleImpl net;
    const auto model = fully_shard(
        net, group, {.param_dtype = at::kBFloat16, .output_dtype = at::kFloat});
    const at::Tensor x = torch::tensor({{1.0F, 2.0F, -1.0F}}).requires_grad_();
    const auto [scores, kept] = model->forward(
        [&](const at::Tensor& in,
            const std::map<std::string, at::Tensor>& others) {
          EXPECT_EQ(in.scalar_type(), at::kBFloat16);
          EXPECT_EQ(net.weight.scalar_type(), at::kBFloat16);
          EXPECT_EQ(others.at("wide").scalar_type(), at::kBFloat16);
          EXPECT_EQ(others.at("places").scalar_type(), at::kLong);
          const at::Tensor y = in * net.weight;
          return std::pair(y,
                           std::vector<at::Tensor>{others.at("places"), y + 1});
        },
        x,
        std::map<std::string, at::Tensor>{
            {"wide", torch::ones({3})},
            {"places", torch::ones({3}, at::kLong)}});
    EXPECT_EQ(scores.scalar_type(), at::kFloat);
    EXPECT_EQ(kept[0].scalar_type(), at::kLong);
    EXPECT_EQ(kept[1].scalar_type(), at::kFloat);
    scores.sum().backward();
    EXPECT_TRUE(at::equal(x.grad(), torch::full({1, 3}, 2.0F)));
    EXPECT_EQ(net.weight.scalar_type(), at::kFloat);
    EXPECT_EQ(net.weight.grad().scalar_type(), at::kFloat);
  });
}

TEST(FullyShardTest, WritesInForwardAndLateModulesAreRefused) {
  run_ranks(2, [](const Group& group) {
    Net net = with_values(Net(), 1);
    const auto model = fully_shard(*net, group);
    const auto forward = [&] {
      return model->forward([&] { return net(random({3, 6}, 1)); });
    };
    net->first->writes = true;
    EXPECT_THAT(error_of(forward),
                HasSubstr("writes to parameter 'first.lin.weight'"));
    net->first->writes = false;
    forward().sum().backward();
    net->register_module("late", torch::nn::Linear(2, 2));
    EXPECT_THAT(error_of(forward),
                HasSubstr("'late.weight' was registered after sharding"));
  });
}

TEST(FullyShardTest, ForwardsOfTwoThreadsAreOneErrorOnAllRanks) {
  run_ranks(2, [](const Group& group) {
    Net net = with_values(Net(), 1);
    const auto model = fully_shard(*net, group);
    const at::Tensor x = random({3, 6}, 1);
    EXPECT_THAT(error_of([&] {
                  model->forward([&] {
                    const at::Tensor y = net(x);
                    if (group->getRank() == 0) {
                      std::thread([&] {
                        EXPECT_THAT(error_of([&] {
                                      model->forward([&] { return x; });
                                    }),
                                    HasSubstr("in another thread"));
                      }).join();
                    }
                    return y;
                  });
                }),
                HasSubstr("in another thread"));
    model->forward([&] { return net(x); }).sum().backward();
  });
}

// Linear layers of these sizes; optionally a parameter of the root, used last.
struct ChainImpl : torch::nn::Module {
  ChainImpl(const std::vector<int64_t>& sizes, bool has_gain) {
    for (size_t i = 1; i < sizes.size(); ++i) {
      layers->push_back(torch::nn::Linear(
          torch::nn::LinearOptions(sizes[i - 1], sizes[i]).bias(false)));
    }
    register_module("layers", layers);
    if (!has_gain) return;
    gain = register_parameter("gain", torch::ones({128, sizes.back()}));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = layers->forward(x);
    return (gain.defined() ? y.unsqueeze(1) * gain : y).sum();
  }
  torch::nn::Sequential layers;
  at::Tensor gain;
};
TORCH_MODULE(Chain);

// Returns the number after `begin`.
std::string mebibytes_after(const std::string& text, const std::string& begin) {
  const size_t number = text.find(begin) + begin.size();
  return text.substr(number, text.find(" MiB", number) - number);
}

struct BufferCase {
  FullyShardOptions options = {};
  size_t max_reducing = 2;
};

void expect_planned_buffers(const std::vector<int64_t>& sizes,
                            const BufferCase& of, bool has_gain) {
  run_ranks(2, [&](const Group& group) {
    Chain net(sizes, has_gain);
    const auto model = fully_shard(*net, group, of.options);
    model->set_max_reducing(of.max_reducing);
    const std::string before = model->explain();
    EXPECT_THAT(before, HasSubstr("backward (expected; recorded in"));
    for (int step = 0; step < 6; ++step) {
      const at::Tensor x = random({4, sizes.front()}, step).requires_grad_();
      model->forward([&] { return net(x); }).backward();
      const torch::NoGradGuard no_grad;
      for (at::Tensor& parameter : net->parameters()) {
        parameter.sub_(parameter.grad(), 1e-3);
      }
    }
    const std::string after = model->explain();
    EXPECT_THAT(after, HasSubstr("backward: "));
    const std::string found = mebibytes_after(after, "allocated now ");
    EXPECT_EQ(mebibytes_after(after, " = "), found) << after;
    if (has_gain) return;  // used in another order than registered
    EXPECT_EQ(mebibytes_after(before, " = "), found) << before;
  });
}

// Each large allocation of a forward or backward fails on rank 1 in turn: of
// buffers, sums and the program's tensors. Returns their number.
int expect_failed_allocations(bool in_backward, int failing_step) {
  const testing::AllocationFailures failures;
  constexpr size_t kBytes = 4096;  // a shard has twice as many
  std::atomic<int> num_threw = 2;
  int number = 0;
  for (; num_threw > 0; ++number) {
    SCOPED_TRACE(c10::str("step ", failing_step, ", allocation ", number));
    num_threw = 0;
    run_ranks(2, [&](const Group& group) {
      const std::vector<int64_t> sizes = {64, 64, 64, 64};
      Chain plain = with_values(Chain(sizes, false), 1);
      Chain net = with_values(Chain(sizes, false), 1);
      const auto model = fully_shard(*net, group);
      const auto run = [&](int step, bool fails) {
        const at::Tensor x = random({32, 64}, step);  // the same on both ranks
        if (fails && !in_backward) failures.fail(number, kBytes);
        const at::Tensor loss = model->forward([&] { return net(x); });
        failures.stop();
        if (fails && in_backward) failures.fail(number, kBytes);
        loss.backward();
      };
      for (int step = 0; step < failing_step + 2; ++step) {
        net->zero_grad();
        if (step == failing_step) {
          const bool fails = group->getRank() == 1;
          try {
            run(step, fails);
          } catch (const c10::Error& error) {
            ++num_threw;
            EXPECT_THAT(error.what(),
                        HasSubstr(fails ? "can't allocate memory" : "rank 1"));
            for (const at::Tensor& parameter : net->parameters()) {
              EXPECT_FALSE(parameter.grad().defined());
            }
          }
          failures.stop();
          ASSERT_TRUE(model->can_continue());
          net->zero_grad();
        }
        run(step, false);
        plain->zero_grad();
        plain(random({32, 64}, step)).backward();
        for (const auto& item : plain->named_parameters()) {
          EXPECT_TRUE(at::equal(
              gather_whole(net->named_parameters()[item.key()].grad()),
              item.value().grad()));
        }
      }
    });
    EXPECT_NE(num_threw, 1);
  }
  return number - 1;
}

TEST(FullyShardTest, AnAllocationThatFailsIsAnErrorOnAllRanks) {
  for (const int step : {0, 2}) {
    EXPECT_GT(expect_failed_allocations(/*in_backward=*/false, step), 0);
    EXPECT_GT(expect_failed_allocations(/*in_backward=*/true, step), 0);
  }
}

TEST(FullyShardTest, BuffersHaveThePlannedSize) {
  std::vector<BufferCase> cases = {
      {.options = {.reshard_after_forward = false}}, {.max_reducing = 1}};
  for (const size_t depth : {0, 1, 2}) {
    cases.push_back({.options = {.prefetch_depth = depth}});
  }
  for (const BufferCase& of : cases) {
    expect_planned_buffers({256, 256, 256, 256, 256, 256}, of, false);
    expect_planned_buffers({256, 512, 128, 768, 256, 384}, of, true);
  }
}

TEST(FullyShardTest, KeepsTheUnitsThatFitIntoABudget) {
  run_ranks(2, [](const Group& group) {
    Net net = with_values(Net(), 1);
    const auto model =
        fully_shard(*net, group, {}, each_is_unit<torch::nn::LinearImpl>());
    EXPECT_THAT([&] { units_to_keep(*model, 1000); },
                Throws<c10::Error>(Property(&c10::Error::what,
                                            HasSubstr("has sampled none"))));
    const auto gathered_in_backward = [&] {
      std::vector<std::string> units;
      model->forward([&] { return net(random({3, 6}, 0)); }).sum().backward();
      for (const GatherTimes& gather : model->timeline().gathers) {
        if (gather.pass == GatheredIn::kBackward) units.push_back(gather.unit);
      }
      return units;
    };
    constexpr int64_t kLayerBytes = (6 * 6 + 6) * sizeof(float);  // or the head
    EXPECT_THAT(gathered_in_backward(), ElementsAre("head", "second.lin"));
    EXPECT_THAT(units_to_keep(*model, 0), ::testing::IsEmpty());
    // The first layer's weight is not needed in backward.
    const auto kept = units_to_keep(*model, kLayerBytes);
    ASSERT_THAT(kept, ::testing::SizeIs(1));
    model->settings(kept[0]).reshard_after_forward = false;
    EXPECT_THAT(gathered_in_backward(), ::testing::SizeIs(1));
    EXPECT_THAT(units_to_keep(*model, 1 << 20), ::testing::SizeIs(1));
  });
}

TEST(FullyShardTest, ALateRankAnswersBetweenItsSteps) {
  run_ranks(2, [](const Group& group) {
    Net net = with_values(Net(), 1);
    const auto model = fully_shard(*net, group);
    model->set_stall_report_after(std::chrono::milliseconds(40));
    const auto run = [&] { return net->forward(random({3, 6}, 1)); };
    model->forward(run).sum().backward();
    std::string answer;  // of rank 1 to the waiting rank
    const auto now = std::chrono::steady_clock::now;
    const auto end = now() + std::chrono::seconds(10);
    while (group->getRank() == 1 && now() < end &&
           answer.find("since the backward of step 1") == std::string::npos) {
      for (int channel = 1; channel < 9; ++channel) {
        const std::string key =
            c10::str("brigade/status/", channel, "/progress/answer/1");
        auto& store = *group->getStore();
        if (store.check({key})) answer = store.get_to_str(key);
      }
    }
    EXPECT_TRUE(group->getRank() == 0 || now() < end) << answer;
    model->forward(run).sum().backward();
  });
}

TEST(FullyShardTest, ErrorsNameTheMistake) {
  EXPECT_THAT(error_of([] { fully_shard(*Net(), Group()); }),
              HasSubstr("process group is null"));
  EXPECT_THAT(error_of([] { make_subgroup(nullptr, {0}); }),
              HasSubstr("process group is null"));
  run_ranks(2, [](const Group& group) {
    const int rank = group->getRank();
    EXPECT_THAT(error_of([&] { fully_shard(*torch::nn::Tanh(), group); }),
                HasSubstr("no parameters"));
    EXPECT_THAT(error_of([&] {
                  fully_shard(*Net(), group, {.output_dtype = at::kLong});
                }),
                HasSubstr("found Long"));
    EXPECT_THAT(error_of([&] {
                  fully_shard(*Net(), group,
                              {.prefetch_depth = rank == 0 ? 1u : 2u});
                }),
                HasSubstr("prefetch_depth"));
    EXPECT_THAT(
        error_of([&] { fully_shard(*torch::nn::Linear(2, 2 + rank), group); }),
        HasSubstr("'weight'"));
    Net net;
    auto model = fully_shard(*net, group);
    EXPECT_THAT(error_of([&] { fully_shard(*net, group); }),
                HasSubstr("is sharded already"));
    EXPECT_THAT(error_of([&] { model->set_max_reducing(0); }),
                HasSubstr("found 0"));
    torch::optim::LBFGS lbfgs(net->parameters(), 0.1);
    EXPECT_THAT(error_of([&] {
                  lbfgs.step([&] {
                    const auto run = [&] { return net(random({3, 6}, 1)); };
                    const at::Tensor loss = model->forward(run).sum();
                    loss.backward();
                    return loss;
                  });
                }),
                HasSubstr("use an elementwise one"));
    const auto without_model = [&] { net(random({3, 6}, 1)); };
    EXPECT_THAT(error_of(without_model),
                HasSubstr("needs parameter 'first.lin.weight' unsharded"));
    model.reset();
    EXPECT_THAT(error_of(without_model),
                HasSubstr("If it was destroyed, the values are gone"));
  });
}

}  // namespace fully_shard_test
}  // namespace brigade
