#include <torch/torch.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "brigade/comm/process_group.h"
#include "brigade/comm_hooks/comm_hooks.h"
#include "brigade/ddp/distributed_data_parallel.h"
#include "brigade/tests/ddp/toy_module.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::HasSubstr;
using testing::Order;
using testing::run_ranks;
using testing::ToyModel;
using testing::ToyModule;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Inputs = std::vector<int>;  // number of inputs of each rank

enum class Graph { kFixed, kFindsUnused, kSkipsUnused, kStatic };

// Returns the parameters that a rank uses in a step.
Order uses_of(Graph graph, int rank, int step) {
  switch (graph) {
    case Graph::kFixed:
      return {0, 1, 2, 3};
    case Graph::kStatic:
      return {3, 1, 0};
    case Graph::kFindsUnused:
    case Graph::kSkipsUnused:
      break;
  }
  Order uses = {0};
  if (rank % 2 == step % 2) uses.push_back(1);
  if (step % 3 == 0) uses.push_back(2);
  return uses;
}

ReducerOptions options_of(Graph graph) {
  return {
      .find_unused_parameters =
          graph == Graph::kFindsUnused || graph == Graph::kSkipsUnused,
      .skip_all_reduce_unused_parameters = graph == Graph::kSkipsUnused,
      .static_graph = graph == Graph::kStatic,
  };
}

void step_with(torch::nn::Module& module) {
  const at::NoGradGuard no_grad;
  for (at::Tensor& p : module.parameters()) {
    if (p.grad().defined()) p.sub_(p.grad() * 0.25);
    p.mutable_grad().reset();
  }
}

std::vector<int> ranks_with_data(const Inputs& inputs, int step) {
  std::vector<int> ranks;
  for (size_t r = 0; r < inputs.size(); ++r) {
    if (inputs[r] > step) ranks.push_back(static_cast<int>(r));
  }
  return ranks;
}

// Model of one process that has the inputs of all ranks.
class Reference {
 public:
  explicit Reference(size_t world_size) : seen_(world_size, 0) {}

  void train(Graph graph, const Inputs& inputs, JoinDivisor divisor) {
    int last = 0;
    for (int s = 0; s < *std::max_element(inputs.begin(), inputs.end()); ++s) {
      const std::vector<int> ranks = ranks_with_data(inputs, s);
      last = ranks.front();
      seen_.assign(seen_.size(), seen_[last]);
      for (const int rank : ranks) seen_[rank] += rank + 1;
      const at::NoGradGuard no_grad;
      for (size_t i = 0; i < module_->toy.parameters.size(); ++i) {
        at::Tensor sum;
        for (const int rank : ranks) {
          const Order uses = uses_of(graph, rank, s);
          if (std::find(uses.begin(), uses.end(), i) == uses.end()) continue;
          const at::Tensor own = module_->toy.gradient(i, rank, s);
          sum = sum.defined() ? sum + own : own;
        }
        if (!sum.defined()) continue;
        module_->toy.parameters[i].mutable_grad() =
            sum / static_cast<int64_t>(divisor == JoinDivisor::kWorldSize
                                           ? inputs.size()
                                           : ranks.size());
      }
      step_with(*module_);
    }
    last_ = last;
  }

  // Copies the buffers as join() does at its end.
  void copy_buffers() { seen_.assign(seen_.size(), seen_[last_]); }

  void expect_equal(const ToyModule& module, int rank,
                    const std::string& where) const {
    expect_equal_parameters(module, where);
    EXPECT_EQ(module->seen.item<float>(), seen_[rank]) << where;
  }

  void expect_equal_parameters(const ToyModule& module,
                               const std::string& where) const {
    for (size_t i = 0; i < module->toy.parameters.size(); ++i) {
      EXPECT_TRUE(
          at::equal(module->toy.parameters[i], module_->toy.parameters[i]))
          << where << " parameter " << i;
    }
  }

 private:
  ToyModule module_;
  std::vector<float> seen_;  // the buffer of each rank
  int last_ = 0;             // the lowest rank with data in the last step
};

void train(DistributedDataParallel<ToyModule>& model, Graph graph, int rank,
           int num_inputs) {
  for (int s = 0; s < num_inputs; ++s) {
    model(uses_of(graph, rank, s), rank, s).backward();
    step_with(*model.module());
  }
}

class JoinTest : public ::testing::TestWithParam<
                     std::tuple<Graph, JoinDivisor, bool, int64_t, bool>> {};

TEST_P(JoinTest, TrainsAsOneProcessThatHasAllInputs) {
  const auto [graph, divisor, views, cap, is_reproducible] = GetParam();
  // In the first two cases rank 0 has no input.
  for (const Inputs& inputs :
       {Inputs{0, 3, 1, 2}, Inputs{0, 2}, Inputs{5, 2, 3, 0}, Inputs{3, 3},
        Inputs{1, 2, 4}, Inputs{2}, Inputs{0, 0}}) {
    Reference reference(inputs.size());
    const bool any = *std::max_element(inputs.begin(), inputs.end()) > 0;
    const Inputs even(inputs.size(), 2);
    Inputs reversed = inputs;
    std::reverse(reversed.begin(), reversed.end());
    reference.train(graph, inputs, divisor);
    if (any) reference.copy_buffers();
    reference.train(graph, even, divisor);
    reference.train(graph, reversed, divisor);
    if (any) reference.copy_buffers();
    run_ranks(static_cast<int>(inputs.size()), [&](const Group& group) {
      ReducerOptions options = options_of(graph);
      options.gradient_as_bucket_view = views;
      options.bucket_cap_bytes = {cap};
      options.reproducible = is_reproducible;
      ToyModule module;
      DistributedDataParallel model(module, group, {.reducer = options});
      const int rank = group->getRank();
      join(
          model, [&] { train(model, graph, rank, inputs[rank]); }, divisor);
      train(model, graph, rank, even[rank]);
      join(
          model, [&] { train(model, graph, rank, reversed[rank]); }, divisor);
      reference.expect_equal(module, rank,
                             "rank " + std::to_string(rank) + " of " +
                                 ::testing::PrintToString(inputs));
    });
  }
}

INSTANTIATE_TEST_SUITE_P(
    Graphs, JoinTest,
    ::testing::Values(
        std::tuple(Graph::kFixed, JoinDivisor::kWorldSize, true, 1, false),
        std::tuple(Graph::kFixed, JoinDivisor::kRanksWithData, false, 1 << 20,
                   false),
        std::tuple(Graph::kFindsUnused, JoinDivisor::kWorldSize, false, 1 << 20,
                   false),
        std::tuple(Graph::kFindsUnused, JoinDivisor::kRanksWithData, true, 1,
                   false),
        std::tuple(Graph::kSkipsUnused, JoinDivisor::kWorldSize, true, 1 << 20,
                   false),
        std::tuple(Graph::kSkipsUnused, JoinDivisor::kRanksWithData, false, 1,
                   false),
        std::tuple(Graph::kStatic, JoinDivisor::kWorldSize, false, 1, false),
        std::tuple(Graph::kStatic, JoinDivisor::kRanksWithData, true, 1 << 20,
                   false)));
INSTANTIATE_TEST_SUITE_P(
    Reproducible, JoinTest,
    ::testing::Values(
        std::tuple(Graph::kFixed, JoinDivisor::kWorldSize, true, 1, true),
        std::tuple(Graph::kSkipsUnused, JoinDivisor::kRanksWithData, true, 1,
                   true),
        std::tuple(Graph::kStatic, JoinDivisor::kWorldSize, true, 1, true)));

TEST(JoinLoopTest, PropagatesExceptionsOfTheLoop) {
  run_ranks(2, [](const Group& group) {
    DistributedDataParallel model(ToyModule(), group);
    const int rank = group->getRank();
    EXPECT_THROW(join(model,
                      [&] {
                        train(model, Graph::kFixed, rank, 1);
                        throw std::domain_error("of the loop");
                      }),
                 std::domain_error);
    join(model, [&] { train(model, Graph::kFixed, rank, 1 + rank); });
    EXPECT_EQ(model.reducer().statistics().reduced, 3);
  });
}

TEST(JoinLoopTest, AnErrorOfOneRankEndsJoinOnAllRanks) {
  run_ranks(3, [](const Group& group) {
    ToyModule module;
    DistributedDataParallel model(module, group);
    const int rank = group->getRank();
    // Rank 0 runs out of inputs before rank 2 throws.
    try {
      join(model, [&] {
        for (int s = 0; s < 1 + rank; ++s) {
          const at::Tensor loss = model(Order{0, 1, 2, 3}, rank, s);
          if (rank == 2 && s == 1) {
            module->toy.parameters[1].register_hook([](const at::Tensor&) {
              throw std::domain_error("of one rank");
            });
          }
          loss.backward();
        }
      });
      ADD_FAILURE() << "no error on rank " << rank;
    } catch (const std::exception& error) {
      EXPECT_THAT(error.what(),
                  HasSubstr(rank == 2 ? "of one rank"
                                      : "rank 2 failed in iteration 2"));
    }
  });
}

TEST(JoinLoopTest, TrainsWithEachRanksOwnBuffers) {
  const Inputs inputs = {1, 4, 2};
  Reference reference(inputs.size());
  reference.train(Graph::kFixed, inputs, JoinDivisor::kWorldSize);
  run_ranks(3, [&](const Group& group) {
    ToyModule module;
    DistributedDataParallel model(module, group, {.broadcast_buffers = false});
    const int rank = group->getRank();
    join(model, [&] { train(model, Graph::kFixed, rank, inputs[rank]); });
    reference.expect_equal_parameters(module, "rank " + std::to_string(rank));
    EXPECT_EQ(module->seen.item<float>(), 8);
  });
}

TEST(JoinLoopTest, DifferentOptionsAreAnErrorOnAllRanks) {
  run_ranks(2, [](const Group& group) {
    DistributedDataParallel model(ToyModule(), group);
    EXPECT_THROW(join(
                     model, [] {},
                     group->getRank() == 0 ? JoinDivisor::kWorldSize
                                           : JoinDivisor::kRanksWithData),
                 c10::ValueError);
    EXPECT_THROW(
        DistributedDataParallel(ToyModule(), group,
                                {.broadcast_buffers = group->getRank() == 0}),
        c10::ValueError);
  });
}

TEST(JoinLoopTest, RefusesAnEmptyListAndANestedJoin) {
  DistributedDataParallel model(ToyModule(), single_process_group());
  EXPECT_THROW(join(std::span<ReplicatedModule* const>(), [] {}),
               c10::ValueError);
  EXPECT_THROW(join(model, [&] { join(model, [] {}); }), c10::Error);
  join(model, [&] { train(model, Graph::kFixed, 0, 1); });
}

TEST(JoinLoopTest, RefusesRanksWithDataUnderAUsersCommHook) {
  const auto group = single_process_group();
  const auto sum = make_comm_hook([group](c10d::GradBucket& bucket) {
    std::vector<at::Tensor> tensors = {bucket.getBuffer()};
    return group->allreduce(tensors)->getFuture();
  });
  DistributedDataParallel model(ToyModule(), group,
                                {.reducer = {.comm_hook = sum}});
  EXPECT_THROW(join(
                   model, [] {}, JoinDivisor::kRanksWithData),
               c10::ValueError);
}

TEST(JoinLoopTest, DoesNotShadowAccumulation) {
  run_ranks(2, [](const Group& group) {
    ToyModule module;
    DistributedDataParallel model(module, group);
    const int rank = group->getRank();
    const Order all = {0, 1, 2, 3};
    join(model, [&] {
      for (int s = 0; s < 1 + rank; ++s) {
        {
          const NoSync no_sync = model.no_sync();
          model(all, rank, 10 + s).backward();
        }
        model(all, rank, s).backward();
        if (s == 1) {
          EXPECT_TRUE(at::equal(
              module->toy.parameters[2].grad(),
              (module->toy.gradient(2, 1, 11) + module->toy.gradient(2, 1, 1)) /
                  2));
        }
        step_with(*module);
      }
    });
    EXPECT_EQ(model.reducer().statistics().reduced, 2);
  });
}

TEST(JoinLoopTest, TrainsSeveralModels) {
  run_ranks(3, [](const Group& group) {
    const Inputs inputs = {1, 4, 2};
    const int rank = group->getRank();
    ToyModule first;
    ToyModule second;
    DistributedDataParallel model(first, group);
    DistributedDataParallel other(
        second, group, {.reducer = {.find_unused_parameters = true}});
    ReplicatedModule* const both[] = {&model.replicated(), &other.replicated()};
    join(std::span<ReplicatedModule* const>(both), [&] {
      for (int s = 0; s < inputs[rank]; ++s) {
        model(uses_of(Graph::kFixed, rank, s), rank, s).backward();
        step_with(*first);
        other(uses_of(Graph::kFindsUnused, rank, s), rank, s).backward();
        step_with(*second);
      }
    });
    Reference of_first(3);
    of_first.train(Graph::kFixed, inputs, JoinDivisor::kWorldSize);
    of_first.copy_buffers();
    of_first.expect_equal(first, rank, "first");
    Reference of_second(3);
    of_second.train(Graph::kFindsUnused, inputs, JoinDivisor::kWorldSize);
    of_second.copy_buffers();
    of_second.expect_equal(second, rank, "second");
  });
}

}  // namespace
}  // namespace brigade
