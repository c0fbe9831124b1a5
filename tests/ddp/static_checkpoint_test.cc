// Static graphs whose parameters are used in checkpoints, several times, and in
// several forwards of one backward.

#include <torch/torch.h>

#include <memory>
#include <tuple>

#include "brigade/ddp/distributed_data_parallel.h"
#include "brigade/hooks/checkpoint.h"
#include "brigade/tests/support/local_ranks.h"
#include "gtest/gtest.h"

namespace brigade {
namespace static_checkpoint_test {

using testing::run_ranks;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// Integer weights, so that sums are exact. `shared` is used in both
// checkpoints.
struct Net : torch::nn::Module {
  Net() {
    register_module("shared", shared);
    register_module("own", own);
    const at::NoGradGuard no_grad;
    for (const at::Tensor& p : parameters()) {
      p.copy_((at::arange(p.numel()) % 5 - 2).reshape(p.sizes()));
    }
  }

  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor hidden =
        checkpoint([this](const at::Tensor& h) { return shared(h).relu(); }, x);
    return checkpoint(
               [this](const at::Tensor& h) {
                 return own(shared(h).relu()).relu();
               },
               hidden)
        .sum();
  }

  // The same without checkpoints.
  at::Tensor plain(const at::Tensor& x) {
    return own(shared(shared(x).relu()).relu()).relu().sum();
  }

  torch::nn::Linear shared = torch::nn::Linear(3, 3);
  torch::nn::Linear own = torch::nn::Linear(3, 3);
};

at::Tensor input_of(int rank, int step, int forward) {
  return (at::arange(6) + rank + 2 * step + 3 * forward)
      .remainder(7)
      .reshape({2, 3})
      .to(at::kFloat);
}

// Views x forwards per backward.
class StaticCheckpointTest
    : public ::testing::TestWithParam<std::tuple<bool, int>> {};

TEST_P(StaticCheckpointTest, AveragesAsWithoutCheckpoints) {
  const auto [views, num_forwards] = GetParam();
  run_ranks(
      2, [&, views = views, num_forwards = num_forwards](const Group& group) {
        const int rank = group->getRank();
        const auto net = std::make_shared<Net>();
        DistributedDataParallel model(
            net, group,
            {.reducer = {.bucket_caps_bytes = {32},
                         .static_graph = true,
                         .gradient_as_bucket_view = views}});
        for (int step = 0; step < 4; ++step) {
          Net expected;
          at::Tensor all = at::zeros({});
          for (int r = 0; r < 2; ++r) {
            for (int f = 0; f < num_forwards; ++f) {
              all = all + expected.plain(input_of(r, step, f));
            }
          }
          (all / 2).backward();

          net->zero_grad(/*set_to_none=*/step % 2 == 0);
          at::Tensor loss = at::zeros({});
          for (int f = 0; f < num_forwards; ++f) {
            loss = loss + model(input_of(rank, step, f));
          }
          loss.backward();
          for (size_t i = 0; i < net->parameters().size(); ++i) {
            EXPECT_TRUE(at::equal(net->parameters()[i].grad(),
                                  expected.parameters()[i].grad()))
                << "parameter " << i << " step " << step;
          }
        }
        EXPECT_EQ(model.reducer().statistics().reduced, 4);
        EXPECT_EQ(model.reducer().statistics().rebuilds, 1);
      });
}

INSTANTIATE_TEST_SUITE_P(Modes, StaticCheckpointTest,
                         ::testing::Values(std::tuple(true, 2),
                                           std::tuple(false, 1)));

}  // namespace static_checkpoint_test
}  // namespace brigade
