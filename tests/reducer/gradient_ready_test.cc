#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "brigade/comm/process_group.h"
#include "brigade/comm_hooks/comm_hooks.h"
#include "brigade/hooks/autograd_hooks.h"
#include "brigade/reducer/reducer.h"
#include "brigade/tests/reducer/toy_model.h"
#include "brigade/tests/support/local_ranks.h"
#include "gtest/gtest.h"

namespace brigade {
namespace gradient_ready_test {

using testing::run_ranks;
using testing::step;
using testing::ToyModel;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

const ToyModel::Sizes kSizes = {{3, 2}, {5}, {2, 2, 2}};

class CallAfterwards final : public torch::autograd::FunctionPostHook {
 public:
  explicit CallAfterwards(std::function<void()> call)
      : call_(std::move(call)) {}

  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& outputs,
      const torch::autograd::variable_list& /*inputs*/) override {
    call_();
    return outputs;
  }

 private:
  const std::function<void()> call_;
};

// Half precision for the parameters of a float model. Replaces their data
// during forward and backward, which gives them new gradient accumulators.
class HalfPrecision {
 public:
  HalfPrecision(const std::vector<at::Tensor>& parameters, Reducer& reducer)
      : parameters_(parameters) {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      full_.push_back(parameters_[i].data());
      parameters_[i].set_data(full_.back().to(at::kHalf));
      accumulators_.push_back(
          torch::autograd::impl::grad_accumulator(parameters_[i]));
      accumulators_.back()->add_post_hook(std::make_unique<CallAfterwards>(
          [&reducer, i] { reducer.gradient_ready(i); }));
    }
  }

  ~HalfPrecision() {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      parameters_[i].set_data(full_[i]);
    }
  }

 private:
  const std::vector<at::Tensor>& parameters_;
  std::vector<at::Tensor> full_;
  std::vector<NodePtr> accumulators_;
};

void step_in_half(const ToyModel& model, Reducer& reducer, int rank, int s) {
  const HalfPrecision half(model.parameters, reducer);
  step(reducer, model.loss(rank, s));
}

// gradient_as_bucket_view x fp16_hook().
class GradientReadyTest
    : public ::testing::TestWithParam<std::tuple<bool, bool>> {
 protected:
  ReducerOptions options(const Group& group) const {
    ReducerOptions options = {
        .bucket_cap_bytes = {40},
        .gradient_as_bucket_view = std::get<0>(GetParam())};
    if (std::get<1>(GetParam())) options.comm_hook = fp16_hook(group);
    return options;
  }
};

TEST_P(GradientReadyTest, ReducesGradientsOfParametersWhoseDataIsSwapped) {
  run_ranks(2, [&](const Group& group) {
    const ToyModel model(kSizes);
    Reducer reducer(model.parameters, group, options(group));
    reducer.stop_watching_gradients();
    for (int s = 0; s < 5; ++s) {
      model.zero_grad(/*set_to_none=*/s < 3);
      step_in_half(model, reducer, group->getRank(), s);
      for (size_t i = 0; i < kSizes.size(); ++i) {
        const at::Tensor& gradient = model.parameters[i].grad();
        EXPECT_TRUE(at::equal(gradient.to(at::kFloat), model.average(i, 2, s)))
            << "parameter " << i << " step " << s;
        if (s < 3) {
          EXPECT_EQ(gradient.scalar_type(), at::kFloat);
        }
      }
    }
    EXPECT_EQ(reducer.statistics().reduced, 5);
    EXPECT_EQ(reducer.statistics().rebuilds, 1);
  });
}

TEST_P(GradientReadyTest, ReducesGradientsWhoseDataWasCastInPlace) {
  run_ranks(2, [&](const Group& group) {
    const ToyModel model(kSizes);
    Reducer reducer(model.parameters, group, options(group));
    reducer.stop_watching_gradients();
    step_in_half(model, reducer, group->getRank(), 0);
    for (const at::Tensor& p : model.parameters) {
      p.mutable_grad().set_data(p.grad().to(at::kHalf));
    }
    step_in_half(model, reducer, group->getRank(), 1);
    for (size_t i = 0; i < kSizes.size(); ++i) {
      EXPECT_TRUE(at::equal(model.parameters[i].grad().to(at::kFloat),
                            model.average(i, 2, 0) + model.average(i, 2, 1)));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Modes, GradientReadyTest,
                         ::testing::Combine(::testing::Bool(),
                                            ::testing::Bool()));

TEST(GradientReadyErrorsTest, RefusesMisuse) {
  const ToyModel model(kSizes);
  Reducer searching(model.parameters, single_process_group(),
                    {.find_unused_parameters = true});
  EXPECT_THROW(searching.stop_watching_gradients(), c10::ValueError);
  EXPECT_THROW(searching.gradient_ready(0), c10::Error);  // has hooks
  Reducer reducer(model.parameters, single_process_group());
  reducer.stop_watching_gradients();
  EXPECT_THROW(reducer.gradient_ready(3), c10::ValueError);
  EXPECT_THROW(reducer.gradient_ready(0, 1), c10::ValueError);
  EXPECT_THROW(reducer.gradient_ready(0), c10::Error);  // no backward runs
  reducer.prepare_for_backward(model.loss(0));
  EXPECT_THROW(reducer.gradient_ready(0), c10::Error);
  step_in_half(model, reducer, /*rank=*/0, /*s=*/0);
  EXPECT_EQ(reducer.statistics().reduced, 1);
}

TEST(GradientReadyErrorsTest, CannotStopWatchingDuringAnIteration) {
  const ToyModel model(kSizes);
  Reducer reducer(model.parameters, single_process_group());
  model.parameters[0].register_hook([&](const at::Tensor&) {
    EXPECT_THROW(reducer.stop_watching_gradients(), c10::Error);
  });
  step(reducer, model.loss_in_order({1, 2, 0}, /*rank=*/0));
  EXPECT_EQ(reducer.statistics().reduced, 1);
}

TEST(GradientReadyErrorsTest, GradientsThatAreNotMarkedAreMissing) {
  const ToyModel model(kSizes);
  Reducer reducer(model.parameters, single_process_group());
  reducer.stop_watching_gradients();
  const NodePtr accumulator =
      torch::autograd::impl::grad_accumulator(model.parameters[1]);
  const uintptr_t hook =
      accumulator->add_post_hook(std::make_unique<CallAfterwards>(
          [&reducer] { reducer.gradient_ready(1); }));
  step(reducer, model.loss(0));
  EXPECT_EQ(reducer.missing_gradients(), (std::vector<size_t>{0, 2}));
  accumulator->del_post_hook(hook);
}

}  // namespace gradient_ready_test
}  // namespace brigade
