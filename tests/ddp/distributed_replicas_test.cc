#include "brigade/ddp/distributed_replicas.h"

#include <torch/script.h>
#include <torch/torch.h>

#include <tuple>
#include <vector>

#include "brigade/comm/process_group.h"
#include "brigade/ddp/join.h"
#include "brigade/tests/ddp/toy_module.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace distributed_replicas_test {

using ::testing::HasSubstr;
using testing::Order;
using testing::run_ranks;
using testing::ToyModel;
using testing::ToyModule;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

constexpr int kCopies = 4;  // on all ranks together
const Order kAll = {0, 1, 2, 3};

// Copy c of all is copy c % (copies per rank) of rank c / (copies per rank).
std::vector<ToyModule> make_copies(const Group& group) {
  const int per_rank = kCopies / group->getSize();
  std::vector<ToyModule> copies;
  for (int i = 0; i < per_rank; ++i) {
    ToyModule copy;
    const at::NoGradGuard no_grad;
    for (at::Tensor& p : copy->parameters()) {
      p.fill_(group->getRank() * per_rank + i + 1);
    }
    copies.push_back(copy);
  }
  return copies;
}

std::vector<std::tuple<Order, int, int>> inputs_of(const Group& group,
                                                   int step) {
  const int per_rank = kCopies / group->getSize();
  std::vector<std::tuple<Order, int, int>> inputs;
  for (int i = 0; i < per_rank; ++i) {
    inputs.emplace_back(kAll, group->getRank() * per_rank + i, step);
  }
  return inputs;
}

at::Tensor sum_of(const std::vector<at::Tensor>& losses) {
  at::Tensor sum = losses.front();
  for (size_t i = 1; i < losses.size(); ++i) sum = sum + losses[i];
  return sum;
}

TEST(DistributedReplicasTest, OneRankOfFourIsTwoOfTwoIsFourOfOne) {
  constexpr int kSteps = 4;
  const ToyModel model({{3, 2}, {5}, {2, 2, 2}, {7}});
  for (const int world_size : {1, 2, 4}) {
    for (const bool views : {true, false}) {
      run_ranks(world_size, [&](const Group& group) {
        DistributedReplicas<ToyModule> replicas(
            make_copies(group), group,
            {.reducer = {.bucket_caps_bytes = {40},
                         .gradient_as_bucket_view = views}});
        for (int s = 0; s < kSteps; ++s) {
          sum_of(replicas(inputs_of(group, s))).backward();
          for (const ToyModule& copy : replicas.modules()) {
            const at::NoGradGuard no_grad;
            for (const at::Tensor& p : copy->toy.parameters) {
              p.sub_(p.grad() * 0.5);
            }
            copy->toy.zero_grad(/*set_to_none=*/s % 2 == 0);
          }
        }
        for (const ToyModule& copy : replicas.modules()) {
          for (size_t i = 0; i < copy->toy.parameters.size(); ++i) {
            at::Tensor expected = at::ones_like(model.parameters[i]).detach();
            for (int s = 0; s < kSteps; ++s) {
              expected = expected - model.average(i, kCopies, s) * 0.5;
            }
            EXPECT_TRUE(at::equal(copy->toy.parameters[i], expected))
                << "parameter " << i << " world " << world_size;
          }
        }
        EXPECT_EQ(replicas.reducer().statistics().reduced, kSteps);
      });
    }
  }
}

TEST(DistributedReplicasTest, GivesEveryCopyTheBuffersOfTheFirst) {
  for (const int world_size : {1, 2}) {
    run_ranks(world_size, [](const Group& group) {
      DistributedReplicas<ToyModule> replicas(make_copies(group), group);
      for (int s = 0; s < 2; ++s) {
        sum_of(replicas(inputs_of(group, s))).backward();
      }
      int copy = group->getRank() * kCopies / group->getSize();
      for (const ToyModule& module : replicas.modules()) {
        EXPECT_EQ(module->seen.item<float>(), 1 + ++copy);
      }
    });
  }
}

TEST(DistributedReplicasTest, AccumulatesInsideNoSyncAndJoins) {
  run_ranks(2, [](const Group& group) {
    DistributedReplicas<ToyModule> replicas(make_copies(group), group);
    join(replicas, [&] {
      for (int s = 0; s < 1 + group->getRank(); ++s) {
        {
          const NoSync no_sync = replicas.no_sync();
          sum_of(replicas(inputs_of(group, 7 + s))).backward();
        }
        sum_of(replicas(inputs_of(group, s))).backward();
        if (s == 0) {
          for (const ToyModule& copy : replicas.modules()) {
            EXPECT_TRUE(at::equal(copy->toy.parameters[1].grad(),
                                  copy->toy.average(1, kCopies, 0) +
                                      copy->toy.average(1, kCopies, 7)));
          }
        }
        for (const ToyModule& copy : replicas.modules()) copy->toy.zero_grad();
      }
    });
    EXPECT_EQ(replicas.reducer().statistics().reduced, 2);
  });
}

TEST(DistributedReplicasTest, WrapsModulesOfOneTensor) {
  std::vector<torch::nn::Linear> layers = {torch::nn::Linear(2, 1),
                                           torch::nn::Linear(2, 1)};
  DistributedReplicas model(layers, single_process_group());
  EXPECT_TRUE(at::equal(layers[0]->weight, layers[1]->weight));
  sum_of(model({at::ones({1, 2}), at::full({1, 2}, 3.0)})).sum().backward();
  EXPECT_TRUE(at::equal(layers[0]->weight.grad(), at::full({1, 2}, 2.0)));
  EXPECT_TRUE(at::equal(layers[1]->weight.grad(), at::full({1, 2}, 2.0)));
}

TEST(DistributedReplicasTest, WantsAnInputForEachCopy) {
  DistributedReplicas<ToyModule> model({ToyModule(), ToyModule()},
                                       single_process_group());
  try {
    model(std::vector<std::tuple<Order, int, int>>{{kAll, 0, 0}});
    ADD_FAILURE() << "no error";
  } catch (const c10::ValueError& error) {
    EXPECT_THAT(error.what(), HasSubstr("2 copies, got 1"));
  }
}

TEST(DistributedReplicasTest, RefusesCopiesThatDifferOrNone) {
  EXPECT_THROW(DistributedReplicas<ToyModule>({}, single_process_group()),
               c10::ValueError);
  ToyModule once;
  EXPECT_THROW(
      DistributedReplicas<ToyModule>({once, once}, single_process_group()),
      c10::ValueError);
  run_ranks(2, [](const Group& group) {
    std::vector<ToyModule> copies = make_copies(group);
    if (group->getRank() == 1) {
      copies[1]->register_buffer("extra", at::zeros({2}));
    }
    try {
      DistributedReplicas<ToyModule> model(copies, group);
      ADD_FAILURE() << "no error on rank " << group->getRank();
    } catch (const c10::ValueError& error) {
      EXPECT_THAT(error.what(), HasSubstr("local replica 1"));
    }
  });
}

}  // namespace distributed_replicas_test
}  // namespace brigade
