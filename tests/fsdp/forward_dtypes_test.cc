// What a forward's inputs and outputs are cast to.

#include "brigade/fsdp/forward_dtypes.h"

#include <torch/torch.h>

#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "brigade/fsdp/fully_shard.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {

namespace forward_dtypes_test {

using ::testing::HasSubstr;
using ::testing::Property;
using testing::run_ranks;
using ::testing::Throws;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

struct ScaleImpl : torch::nn::Module {
  at::Tensor weight = register_parameter("weight", torch::full({3}, 2.0F));
};

FullyShardOptions narrow(
    std::optional<at::ScalarType> output_dtype = std::nullopt) {
  FullyShardOptions options;
  options.param_dtype = at::kBFloat16;
  options.output_dtype = output_dtype;
  return options;
}

TEST(ForwardDtypesTest, NestsOfInputsAndOutputsAreCast) {
  run_ranks(2, [](const Group& group) {
    ScaleImpl net;
    const auto model = fully_shard(net, group, narrow(at::kFloat));
    const at::Tensor x = torch::tensor({{1.0F, 2.0F, -1.0F}}).requires_grad_();
    const auto [scores, kept] = model->forward(
        [&](const at::Tensor& in,
            const std::map<std::string, at::Tensor>& others) {
          EXPECT_EQ(in.scalar_type(), at::kBFloat16);
          EXPECT_EQ(net.weight.scalar_type(), at::kBFloat16);
          EXPECT_EQ(others.at("wide").scalar_type(), at::kBFloat16);
          EXPECT_EQ(others.at("places").scalar_type(), at::kLong);
          const at::Tensor y = in * net.weight;
          EXPECT_EQ(y.scalar_type(), at::kBFloat16);
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

TEST(ForwardDtypesTest, AnOutputThatCantBeReplacedIsAnErrorOnAllRanks) {
  run_ranks(2, [](const Group& group) {
    ScaleImpl net;
    const auto model = fully_shard(net, group, narrow(at::kFloat));
    const at::Tensor x = torch::ones({3});
    EXPECT_THAT(
        [&] {
          model->forward(
              [&](const at::Tensor& in) {
                return std::tuple<const at::Tensor>(in * net.weight);
              },
              x);
        },
        Throws<c10::ValueError>(Property(&c10::Error::what_without_backtrace,
                                         HasSubstr("constant"))));
    model->forward([&] { return x.to(at::kBFloat16) * net.weight; })
        .sum()
        .backward();
    EXPECT_TRUE(net.weight.grad().defined());
  });
}

}  // namespace forward_dtypes_test
}  // namespace brigade
