// What FullySharded and Sharded cast inputs and outputs to.

#include "brigade/fsdp/forward_dtypes.h"

#include <torch/torch.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "brigade/fsdp/fully_shard.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace forward_dtypes_outputs {

// Without visit_tensors().
struct Opaque {
  at::Tensor scores;
};

inline void collect_tensors(const Opaque& output,
                            std::vector<at::Tensor>& found) {
  found.push_back(output.scores);
}

}  // namespace forward_dtypes_outputs

namespace brigade {
namespace forward_dtypes_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Property;
using testing::run_ranks;
using ::testing::Throws;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Dtypes = std::vector<at::ScalarType>;

ShardingOptions narrow(ShardingOptions options = {}) {
  options.param_dtype = at::kBFloat16;
  return options;
}

// Whole numbers, so that bfloat16 is exact.
at::Tensor input_of(int rank) {
  return torch::tensor({{1.0F + rank, 2.0F, -1.0F}});
}

// x * weight + scale * other, and what it saw.
struct ScaledImpl : torch::nn::Module {
  ScaledImpl() : weight(register_parameter("weight", torch::full({3}, 2.0F))) {}
  at::Tensor forward(const at::Tensor& x,
                     const std::map<std::string, at::Tensor>& others = {},
                     int64_t scale = 1) {
    seen = {x.scalar_type(), weight.scalar_type()};
    at::Tensor y = x * weight;
    for (const auto& [name, other] : others) {
      seen.push_back(other.scalar_type());
      y = y + other * scale;
    }
    return y;
  }
  at::Tensor weight;
  Dtypes seen;

 protected:  // for a Sequential
  FORWARD_HAS_DEFAULT_ARGS(
      {1, torch::nn::AnyValue(std::map<std::string, at::Tensor>())},
      {2, torch::nn::AnyValue(int64_t{1})})
};
TORCH_MODULE(Scaled);

struct PairedImpl : torch::nn::Module {
  PairedImpl()
      : inner(register_module("inner", Sharded<Scaled>(Scaled()))),
        own(register_parameter("own", torch::full({3}, 3.0F))) {}
  std::pair<at::Tensor, std::vector<at::Tensor>> forward(
      const at::Tensor& x, const at::Tensor& places) {
    const at::Tensor h =
        inner(x,
              std::map<std::string, at::Tensor>{{"wide", torch::ones({3})},
                                                {"whole", places}},
              int64_t{2});
    seen = {x.scalar_type(), places.scalar_type(), own.scalar_type(),
            h.scalar_type()};
    return {h * own, {places, h}};
  }
  Sharded<Scaled> inner;
  at::Tensor own;
  Dtypes seen;
};
TORCH_MODULE(Paired);

TEST(ForwardDtypesTest, InputsAreCastToWhatParametersAreSeenIn) {
  run_ranks(2, [](const Group& group) {
    FullySharded model(Paired(), group, narrow());
    Paired net = model.module();
    const at::Tensor x = input_of(group->getRank()).requires_grad_();
    const at::Tensor places = torch::ones({3}, at::kLong);
    const auto [scores, kept] = model(x, places);
    EXPECT_EQ(net->seen,
              (Dtypes{at::kBFloat16, at::kLong, at::kBFloat16, at::kBFloat16}));
    EXPECT_EQ(net->inner->module()->seen,
              (Dtypes{at::kBFloat16, at::kBFloat16, at::kLong, at::kBFloat16}));
    EXPECT_EQ(scores.scalar_type(), at::kBFloat16);
    EXPECT_EQ(kept[0].scalar_type(), at::kLong);
    scores.sum().backward();
    EXPECT_TRUE(at::equal(x.grad(), torch::full({1, 3}, 6.0F)));
    const at::Tensor gradient = model.root().shards_of(1)[0].grad();
    EXPECT_EQ(gradient.scalar_type(), at::kFloat);
  });
}

TEST(ForwardDtypesTest, TheModelsOutputsAreCastWhateverNestTheyAreIn) {
  run_ranks(2, [](const Group& group) {
    FullySharded model(Paired(), group, narrow({.output_dtype = at::kFloat}));
    const auto [scores, kept] =
        model(input_of(group->getRank()), torch::ones({3}, at::kLong));
    EXPECT_EQ(scores.scalar_type(), at::kFloat);
    EXPECT_EQ(kept[0].scalar_type(), at::kLong);
    EXPECT_EQ(kept[1].scalar_type(), at::kFloat);
    // A unit's own are not.
    EXPECT_EQ(model.module()->seen.back(), at::kBFloat16);
    scores.sum().backward();
    EXPECT_EQ(model.root().shards_of(0)[0].grad().scalar_type(), at::kFloat);
  });
}

TEST(ForwardDtypesTest, AUnitsSettingsAreItsOwn) {
  run_ranks(2, [](const Group& group) {
    FullySharded model(Paired(), group, narrow());
    const auto run = [&] {
      model(input_of(group->getRank()), torch::ones({3}, at::kLong));
      return model.module()->seen.back();
    };
    model.root().settings(1).output_dtype = at::kDouble;
    EXPECT_EQ(run(), at::kDouble);
    model.root().settings(1).output_dtype = std::nullopt;
    model.root().settings(1).cast_forward_inputs = false;
    run();  // bfloat16 of the unit around it, float32 of what that makes
    Paired net = model.module();
    EXPECT_THAT(
        net->inner->module()->seen,
        ElementsAre(at::kBFloat16, at::kBFloat16, at::kLong, at::kFloat));
    model.root().settings(0).output_dtype = at::kDouble;
    EXPECT_EQ(
        model(input_of(0), torch::ones({3}, at::kLong)).first.scalar_type(),
        at::kDouble);
  });
}

TEST(ForwardDtypesTest, InputsMayStayAsTheyAre) {
  run_ranks(2, [](const Group& group) {
    FullySharded model(Paired(), group, narrow({.cast_forward_inputs = false}));
    model(input_of(0), torch::ones({3}, at::kLong));
    EXPECT_EQ(model.module()->seen.front(), at::kFloat);
    FullySharded wide(Paired(), group, {});
    wide(input_of(0).to(at::kDouble), torch::ones({3}, at::kLong));
    EXPECT_EQ(wide.module()->seen.front(), at::kDouble);
  });
}

TEST(ForwardDtypesTest, ASequentialCastsForAllItsChildren) {
  run_ranks(2, [](const Group& group) {
    FullySharded model(
        torch::nn::Sequential(torch::nn::ReLU(), Scaled(), Scaled()), group,
        narrow({.output_dtype = at::kFloat}));
    model.root().settings(0).output_dtype = at::kDouble;
    const at::Tensor y = model(input_of(0));
    EXPECT_EQ(y.scalar_type(), at::kFloat);
    EXPECT_TRUE(at::equal(y, torch::tensor({{4.0F, 8.0F, 0.0F}})));
    for (const size_t child : {1, 2}) {
      EXPECT_THAT(model.module()->ptr<ScaledImpl>(child)->seen,
                  ElementsAre(at::kBFloat16, at::kBFloat16));
    }
  });
}

// The same bits as casting by hand.
TEST(ForwardDtypesTest, CastsAreThoseOfTensorTo) {
  run_ranks(2, [](const Group& group) {
    const int rank = group->getRank();
    FullySharded casts(torch::nn::Sequential(Scaled(), Scaled()), group,
                       narrow({.output_dtype = at::kFloat}));
    FullySharded by_hand(torch::nn::Sequential(Scaled(), Scaled()), group,
                         narrow({.cast_forward_inputs = false}));
    const at::Tensor x = torch::linspace(-1, 1 + rank, 12).view({4, 3});
    casts(x).square().sum().backward();
    by_hand(x.to(at::kBFloat16)).to(at::kFloat).square().sum().backward();
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_TRUE(at::equal(casts.parameters()[i].grad(),
                            by_hand.parameters()[i].grad()));
    }
  });
}

struct OpaqueNetImpl : torch::nn::Module {
  OpaqueNetImpl()
      : weight(register_parameter("weight", torch::full({3}, 2.0F))) {}
  forward_dtypes_outputs::Opaque forward(const at::Tensor& x) {
    return {x * weight};
  }
  at::Tensor weight;
};
TORCH_MODULE(OpaqueNet);

TEST(ForwardDtypesTest, AnOutputThatCantBeReplacedIsAnErrorOnAllRanks) {
  run_ranks(2, [](const Group& group) {
    FullySharded model(OpaqueNet(), group,
                       narrow({.output_dtype = at::kFloat}));
    EXPECT_THAT(
        [&] { model(input_of(0)); },
        Throws<c10::ValueError>(Property(&c10::Error::what_without_backtrace,
                                         HasSubstr("visit_tensors()"))));
    model.root().settings(0).output_dtype = std::nullopt;
    model(input_of(0)).scores.sum().backward();
    EXPECT_TRUE(model.parameters()[0].grad().defined());
  });
}

TEST(ForwardDtypesTest, OptionsThatMakeNoSenseOrDifferAreErrors) {
  run_ranks(2, [](const Group& group) {
    const auto make = [&](const ShardingOptions& options) {
      return [&, options] { FullySharded(Scaled(), group, options); };
    };
    EXPECT_THAT(
        make({.output_dtype = at::kLong}),
        Throws<c10::ValueError>(Property(&c10::Error::what_without_backtrace,
                                         HasSubstr("found Long"))));
    EXPECT_THAT(
        make({.cast_forward_inputs = group->getRank() == 0}),
        Throws<c10::ValueError>(Property(&c10::Error::what_without_backtrace,
                                         HasSubstr("cast_forward_inputs"))));
  });
}

}  // namespace forward_dtypes_test
}  // namespace brigade
