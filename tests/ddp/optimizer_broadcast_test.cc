#include "brigade/ddp/optimizer_broadcast.h"

#include <torch/torch.h>

#include <vector>

#include "brigade/tests/support/local_ranks.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using testing::run_ranks;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

std::vector<at::Tensor> make_parameters() {
  return {at::ones({3}).requires_grad_(), at::ones({2, 2}).requires_grad_()};
}

template <typename Optimizer>
void step(Optimizer& optimizer, const std::vector<at::Tensor>& parameters,
          double gradient) {
  for (const at::Tensor& p : parameters) {
    p.mutable_grad() = at::full(p.sizes(), gradient);
  }
  optimizer.step();
}

// Of every rank, rank 0's.
bool equal_on_all_ranks(const std::vector<at::Tensor>& parameters,
                        const Group& group) {
  for (const at::Tensor& p : parameters) {
    std::vector<at::Tensor> first = {p.detach().clone()};
    group->broadcast(first)->wait();
    if (!at::equal(first[0], p)) return false;
  }
  return true;
}

TEST(OptimizerBroadcastTest, LetsRanksThatSteppedUnequallyOftenGoOnAlike) {
  for (const int source : {0, 2}) {
    run_ranks(3, [source](const Group& group) {
      const std::vector<at::Tensor> parameters = make_parameters();
      torch::optim::Adam optimizer(parameters, /*lr=*/0.5);
      for (int s = 0; s < group->getRank() + (source == 0); ++s) {
        step(optimizer, parameters, 1.0 + s);
      }
      {
        const at::NoGradGuard no_grad;
        for (const at::Tensor& p : parameters) at::Tensor(p).fill_(1.0);
      }
      broadcast_optimizer_state(optimizer, group, source);
      for (int s = 0; s < 3; ++s) step(optimizer, parameters, 2.0 - s);
      EXPECT_TRUE(equal_on_all_ranks(parameters, group));
    });
  }
}

TEST(OptimizerBroadcastTest, LeavesNoStateThatTheSourceHasNot) {
  run_ranks(2, [](const Group& group) {
    const std::vector<at::Tensor> parameters = make_parameters();
    torch::optim::Adam optimizer(parameters, /*lr=*/0.5);
    if (group->getRank() == 1) step(optimizer, parameters, 1.0);
    broadcast_optimizer_state(optimizer, group);
    EXPECT_TRUE(optimizer.state().empty());
  });
}

TEST(OptimizerBroadcastTest, AnOptimizerThatTheStateDoesNotFitKeepsItsOwn) {
  run_ranks(2, [](const Group& group) {
    const bool is_source = group->getRank() == 0;
    std::vector<at::Tensor> parameters = make_parameters();
    const double own_rate = is_source ? 0.1 : 0.5;
    torch::optim::Adam optimizer(
        {torch::optim::OptimizerParamGroup({parameters[0]}),
         torch::optim::OptimizerParamGroup({parameters[1]})},
        torch::optim::AdamOptions(own_rate));
    step(optimizer, parameters, 1.0);
    if (is_source) {
      parameters.push_back(at::ones({1}).requires_grad_());
      optimizer.param_groups()[1].params().push_back(parameters.back());
      broadcast_optimizer_state(optimizer, group);
    } else {
      EXPECT_THROW(broadcast_optimizer_state(optimizer, group), c10::Error);
    }
    EXPECT_EQ(optimizer.state().size(), 2u);
    EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), own_rate);
  });
}

}  // namespace
}  // namespace brigade
