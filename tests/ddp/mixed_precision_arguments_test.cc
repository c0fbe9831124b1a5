#include <torch/torch.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "brigade/comm/process_group.h"
#include "brigade/ddp/distributed_data_parallel.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::ElementsAre;

constexpr MixedPrecision kHalfPrecision = {.parameters = at::kBFloat16};

// Module that returns its argument.
struct Echo : torch::nn::Module {
  Echo() { register_parameter("weight", weight); }
  template <typename T>
  T forward(const T& argument) {
    address = &argument;
    return argument;
  }
  const at::Tensor weight = at::ones({1}).requires_grad_();
  const void* address = nullptr;
};

template <typename T>
std::vector<at::ScalarType> dtypes_given_to_forward(const T& argument) {
  DistributedDataParallel model(std::make_shared<Echo>(),
                                single_process_group(),
                                {.mixed_precision = kHalfPrecision});
  const at::NoGradGuard no_grad;
  std::vector<at::ScalarType> dtypes;
  for (const at::Tensor& tensor : tensors_of(model(argument))) {
    dtypes.push_back(tensor.scalar_type());
  }
  return dtypes;
}

TEST(MixedPrecisionArgumentsTest, TensorsInNestsAreCast) {
  const at::Tensor x = at::ones({2});
  const at::Tensor i = at::ones({2}, at::kLong);
  EXPECT_THAT(dtypes_given_to_forward(x), ElementsAre(at::kBFloat16));
  EXPECT_THAT(dtypes_given_to_forward(i), ElementsAre(at::kLong));
  EXPECT_THAT(dtypes_given_to_forward(std::vector<at::Tensor>{x, i}),
              ElementsAre(at::kBFloat16, at::kLong));
  EXPECT_THAT(
      dtypes_given_to_forward(std::tuple(
          x, std::optional(i), std::map<int, at::Tensor>{{1, x}, {2, {}}}, 3)),
      ElementsAre(at::kBFloat16, at::kLong, at::kBFloat16));
}

TEST(MixedPrecisionArgumentsTest, TensorsInIValuesAreCast) {
  const at::Tensor x = at::ones({2});
  const at::Tensor i = at::ones({2}, at::kLong);
  c10::Dict<std::string, at::Tensor> dict;
  dict.insert("x", x);
  const c10::IValue nest = c10::ivalue::Tuple::create(
      {x, i, c10::List<at::Tensor>({x, x}), dict, 3, "text"});
  EXPECT_THAT(dtypes_given_to_forward(nest),
              ElementsAre(at::kBFloat16, at::kLong, at::kBFloat16,
                          at::kBFloat16, at::kBFloat16));
  EXPECT_EQ(dict.at("x").scalar_type(), at::kFloat);
  EXPECT_THAT(dtypes_given_to_forward(std::vector<c10::IValue>{x, 1, i}),
              ElementsAre(at::kBFloat16, at::kLong));
}

TEST(MixedPrecisionArgumentsTest, ArgumentsThatNeedNoCastAreNotCopied) {
  const at::Tensor x = at::ones({2});
  const at::Tensor low = x.to(at::kBFloat16);
  const auto echo = std::make_shared<Echo>();
  const at::NoGradGuard no_grad;
  {
    DistributedDataParallel model(echo, single_process_group());
    model(x);
    EXPECT_EQ(echo->address, &x);
  }
  DistributedDataParallel model(echo, single_process_group(),
                                {.mixed_precision = kHalfPrecision});
  model(low);
  EXPECT_EQ(echo->address, &low);
  model(x);
  EXPECT_NE(echo->address, &x);
}

TEST(MixedPrecisionArgumentsTest, InputsGetGradients) {
  torch::nn::Linear linear(3, 2);
  DistributedDataParallel model(linear, single_process_group(),
                                {.mixed_precision = kHalfPrecision});
  for (int s = 0; s < 2; ++s) {
    const at::Tensor input = at::ones({4, 3}).requires_grad_();
    const at::Tensor output = model(input);
    EXPECT_EQ(output.scalar_type(), at::kBFloat16);
    output.sum().backward();
    EXPECT_EQ(input.grad().scalar_type(), at::kFloat);
    EXPECT_TRUE(at::equal(
        input.grad(),
        linear->weight.detach().to(at::kBFloat16).sum(0).expand({4, 3})));
  }
}

TEST(MixedPrecisionArgumentsTest, OtherTypesMayBeNested) {
  DistributedDataParallel model(std::make_shared<Echo>(),
                                single_process_group(),
                                {.mixed_precision = kHalfPrecision});
  const at::NoGradGuard no_grad;
  const auto [text, tensor] =
      model(std::pair(std::string("text"), at::ones({2})));
  EXPECT_EQ(text, "text");
  EXPECT_EQ(tensor.scalar_type(), at::kBFloat16);
  EXPECT_THAT(model(std::vector<bool>{true, false}), ElementsAre(true, false));
}

// The interpreter profiles the first runs and optimizes later ones.
TEST(MixedPrecisionArgumentsTest, ScriptModules) {
  torch::jit::Module script("net");
  script.register_parameter("weight", at::full({2}, 3.0).requires_grad_(),
                            /*is_buffer=*/false);
  script.define(
      "def forward(self, x):\n    return (self.weight * x).tanh().sum()\n");
  DistributedDataParallel model(script, single_process_group(),
                                {.mixed_precision = kHalfPrecision});
  const at::Tensor weight = script.attr("weight").toTensor();
  for (int s = 0; s < 5; ++s) {
    weight.mutable_grad().reset();
    const at::Tensor input = at::full({2}, 0.125).requires_grad_();
    const at::Tensor loss = model(input).toTensor();
    EXPECT_EQ(loss.scalar_type(), at::kBFloat16);
    {
      const at::NoGradGuard no_grad;
      weight.mul_(2);  // before backward, which needs the old value
    }
    loss.backward();
    const at::Tensor low = at::full({2}, 0.125).to(at::kBFloat16);
    const at::Tensor before = (weight.detach() / 2).to(at::kBFloat16);
    const at::Tensor slope = 1 - (before * low).tanh().square();
    EXPECT_TRUE(
        at::allclose(input.grad(), (slope * before).to(at::kFloat), 0.02));
    EXPECT_TRUE(
        at::allclose(weight.grad(), (slope * low).to(at::kFloat), 0.02));
  }
}

}  // namespace
}  // namespace brigade
