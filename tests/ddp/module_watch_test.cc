#include <torch/torch.h>

#include <string>
#include <utility>
#include <vector>

#include "brigade/comm/process_group.h"
#include "brigade/ddp/distributed_data_parallel.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace module_watch_test {

using ::testing::HasSubstr;

struct NetImpl : torch::nn::Module {
  NetImpl() {
    register_module("linear", linear);
    register_parameter("scale", scale, /*requires_grad=*/false);
  }

  at::Tensor forward(const at::Tensor& x) { return linear(x) * scale; }

  torch::nn::Linear linear = torch::nn::Linear(2, 2);
  at::Tensor scale = at::ones({2});
};
TORCH_MODULE(Net);

template <typename Model>
std::string error_of_forward(Model& model) {
  try {
    model(at::ones({1, 2}));
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "nothing was thrown";
}

class ModuleWatchTest : public ::testing::Test {
 protected:
  DistributedDataParallel<Net> wrap(std::vector<std::string> ignored = {}) {
    return DistributedDataParallel(net_, single_process_group(),
                                   {.ignored = std::move(ignored)});
  }

  Net net_;
};

TEST_F(ModuleWatchTest, NamesAParameterThatWasAdded) {
  auto model = wrap();
  model(at::ones({1, 2})).sum().backward();
  net_->register_parameter("offset", at::ones({2}));
  EXPECT_THAT(error_of_forward(model), HasSubstr("added: 'offset'. "));
}

TEST_F(ModuleWatchTest, NamesTheParametersOfAModuleThatWasReplaced) {
  auto model = wrap();
  net_->replace_module("linear", torch::nn::Linear(2, 2));
  EXPECT_THAT(error_of_forward(model),
              HasSubstr("replaced: 'linear.weight', 'linear.bias'. "));
}

TEST_F(ModuleWatchTest, NamesAParameterThatWasUnfrozen) {
  auto model = wrap();
  net_->scale.set_requires_grad(true);
  EXPECT_THAT(error_of_forward(model), HasSubstr("unfrozen: 'scale'. "));
  net_->scale.set_requires_grad(false);
  model(at::ones({1, 2})).sum().backward();
  EXPECT_EQ(model.reducer().statistics().reduced, 1);
}

TEST_F(ModuleWatchTest, IgnoresParametersThatNeedNoReduction) {
  auto model = wrap(/*ignored=*/{"scale"});
  net_->scale.set_requires_grad(true);
  net_->register_parameter("constant", at::ones({2}), /*requires_grad=*/false);
  for (int s = 0; s < 2; ++s) model(at::ones({1, 2})).sum().backward();
  EXPECT_EQ(model.reducer().statistics().reduced, 2);
}

TEST_F(ModuleWatchTest, IgnoresChangesInEvaluation) {
  auto model = wrap();
  net_->register_parameter("offset", at::ones({2}));
  const at::NoGradGuard no_grad;
  EXPECT_EQ(error_of_forward(model), "nothing was thrown");
}

TEST(ScriptModuleWatchTest, NamesAParameterThatWasUnfrozen) {
  torch::jit::Module script("net");
  script.register_parameter("weight", at::ones({2}).requires_grad_(), false);
  script.register_parameter("scale", at::ones({2}), false);
  script.define(
      "def forward(self, x):\n    return x * self.weight * self.scale\n");
  DistributedDataParallel model(script, single_process_group());
  at::Tensor scale = script.attr("scale").toTensor();
  scale.set_requires_grad(true);
  EXPECT_THAT(error_of_forward(model), HasSubstr("unfrozen: 'scale'. "));
}

}  // namespace module_watch_test
}  // namespace brigade
