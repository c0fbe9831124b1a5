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

}  // namespace
}  // namespace brigade
