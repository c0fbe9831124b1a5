#include "brigade/reducer/reducer.h"

#include <torch/torch.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "brigade/comm/process_group.h"
#include "brigade/comm_hooks/comm_hooks.h"
#include "brigade/tests/reducer/toy_model.h"
#include "brigade/tests/support/local_ranks.h"
#include "brigade/tests/support/recording_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace reducer_test {

using ::testing::ElementsAre;
using testing::expect_averaged;
using ::testing::HasSubstr;
using testing::run_ranks;
using testing::step;
using testing::ToyModel;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

const ToyModel::Sizes kSizes = {{3, 2}, {5}, {}, {2, 2, 2}, {0}, {7}};

// Sizes of the recorded all-reduces.
std::vector<int64_t> all_reduced(const RecordingGroup& recording) {
  std::vector<int64_t> sizes;
  for (const RecordedCollective& collective : recording.log()) {
    if (collective.type == c10d::OpType::ALLREDUCE) {
      sizes.push_back(collective.numel);
    }
  }
  return sizes;
}

// World size x gradient_as_bucket_view x bucket cap in bytes.
class ReducerOnRanksTest
    : public ::testing::TestWithParam<std::tuple<int, bool, int64_t>> {
 protected:
  int world_size() const { return std::get<0>(GetParam()); }
  ReducerOptions options() const {
    return {.bucket_cap_bytes = {std::get<2>(GetParam())},
            .gradient_as_bucket_view = std::get<1>(GetParam())};
  }
};

TEST_P(ReducerOnRanksTest, AveragesGradientsInEveryStep) {
  run_ranks(world_size(), [&](const Group& group) {
    const ToyModel model(kSizes);
    Reducer reducer(model.parameters, group, options());
    for (int s = 0; s < 4; ++s) {
      model.zero_grad();
      step(reducer, model.loss(group->getRank(), s));
      expect_averaged(model, world_size(), s);
    }
    EXPECT_EQ(reducer.statistics().reduced, 4);
  });
}
TEST_P(ReducerOnRanksTest, ReducesGradientsAccumulatedWithoutPreparing) {
  run_ranks(world_size(), [&](const Group& group) {
    const ToyModel model(kSizes);
    Reducer reducer(model.parameters, group, options());
    for (int round = 0; round < 3; ++round) {
      const int64_t before = reducer.statistics().buckets_launched;
      model.zero_grad(/*set_to_none=*/round % 2 == 0);
      model.loss(group->getRank(), 0).backward();
      model.loss(group->getRank(), 1).backward();
      EXPECT_EQ(reducer.statistics().buckets_launched, before);
      step(reducer, model.loss(group->getRank(), 2));
      for (size_t i = 0; i < model.parameters.size(); ++i) {
        EXPECT_TRUE(at::equal(model.parameters[i].grad(),
                              model.average(i, world_size(), 0) +
                                  model.average(i, world_size(), 1) +
                                  model.average(i, world_size(), 2)));
      }
    }
  });
}

// A rebuild between two accumulated backwards keeps their sum.
TEST_P(ReducerOnRanksTest, CarriesAccumulatedGradientsOverARebuild) {
  run_ranks(world_size(), [&](const Group& group) {
    const ToyModel model(kSizes);
    Reducer reducer(model.parameters, group, options());
    step(reducer, model.loss_in_order({0, 3, 1, 4, 2, 5}, group->getRank(), 0));
    step(reducer, model.loss_in_order({0, 3, 1, 4, 2, 5}, group->getRank(), 1));
    EXPECT_EQ(reducer.statistics().rebuilds, 1);
    for (size_t i = 0; i < model.parameters.size(); ++i) {
      EXPECT_TRUE(at::equal(model.parameters[i].grad(),
                            model.average(i, world_size(), 0) +
                                model.average(i, world_size(), 1)))
          << "parameter " << i;
    }
  });
}

TEST_P(ReducerOnRanksTest, AgreesOnTheOrderOfRank0) {
  run_ranks(world_size(), [&](const Group& group) {
    const ToyModel model(kSizes);
    Reducer reducer(model.parameters, group, options());
    std::vector<size_t> order = {5, 4, 3, 2, 1, 0};
    std::rotate(order.begin(), order.begin() + group->getRank() % 6,
                order.end());
    for (int s = 0; s < 3; ++s) {
      model.zero_grad();
      step(reducer, model.loss_in_order(order, group->getRank(), s));
      expect_averaged(model, world_size(), s);
    }
    std::vector<size_t> flat;
    for (const auto& bucket : reducer.plan().buckets()) {
      flat.insert(flat.end(), bucket.begin(), bucket.end());
    }
    EXPECT_THAT(flat, ElementsAre(5, 4, 3, 2, 1, 0));
  });
}

INSTANTIATE_TEST_SUITE_P(
    WorldSizesViewsAndCaps, ReducerOnRanksTest,
    ::testing::Values(std::tuple(1, true, 1), std::tuple(1, false, 40),
                      std::tuple(2, true, 1 << 20), std::tuple(2, false, 1),
                      std::tuple(3, true, 40), std::tuple(3, false, 1 << 20),
                      std::tuple(4, true, 1), std::tuple(4, false, 40)));

// Tries every order of ready gradients with several plans.
TEST(ReducerTest, LaunchesInPlanOrderForEveryReadyOrder) {
  const ToyModel::Sizes sizes = {{1}, {2}, {4}, {8}};
  const std::vector<std::vector<std::vector<size_t>>> plans = {
      {{0, 1, 2, 3}}, {{0}, {1}, {2}, {3}}, {{3, 1}, {0, 2}}, {{2}, {0, 1, 3}}};
  for (const auto& plan : plans) {
    RecordingGroup recording(2);
    const ToyModel model(sizes);
    Reducer reducer(model.parameters, recording.group(), {.bucket_plan = plan});
    std::vector<int64_t> expected;
    for (const auto& bucket : plan) {
      int64_t numel = 0;
      for (size_t i : bucket) numel += model.parameters[i].numel();
      expected.push_back(numel);
    }
    std::vector<size_t> order = {0, 1, 2, 3};
    do {
      const size_t before = all_reduced(recording).size();
      model.zero_grad();
      step(reducer, model.loss_in_order(order, 0));
      std::vector<int64_t> launched = all_reduced(recording);
      launched.erase(launched.begin(), launched.begin() + before);
      ASSERT_EQ(launched, expected);
      for (size_t i = 0; i < 4; ++i) {
        ASSERT_TRUE(at::equal(model.parameters[i].grad(),
                              model.gradient(i, 0)));  // identical ranks
      }
    } while (std::next_permutation(order.begin(), order.end()));
  }
}

// Another thread completes the collectives in reverse order.
TEST(ReducerTest, WaitsForCollectivesThatCompleteInAnyOrder) {
  RecordingGroup recording(2);
  const ToyModel model({{1}, {2}, {3}});
  Reducer reducer(model.parameters, recording.group(),
                  {.bucket_plan = {{2}, {1}, {0}}});
  recording.hold();
  std::thread network([&] {
    while (recording.held().size() < 3) std::this_thread::yield();
    std::vector<size_t> held = recording.held();
    for (auto k = held.rbegin(); k != held.rend(); ++k) recording.complete(*k);
  });
  step(reducer, model.loss(0));
  network.join();
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(at::equal(model.parameters[i].grad(), model.gradient(i, 0)));
  }
}

TEST(ReducerTest, MakesGradientsViewsOfOneBufferPerBucket) {
  const ToyModel model({{2}, {3}, {4}});
  Reducer reducer(model.parameters, single_process_group(),
                  {.bucket_plan = {{2, 0}, {1}}});
  step(reducer, model.loss(0));
  EXPECT_TRUE(
      model.parameters[0].grad().is_alias_of(model.parameters[2].grad()));
  EXPECT_FALSE(
      model.parameters[0].grad().is_alias_of(model.parameters[1].grad()));
  EXPECT_FALSE(model.parameters[0].grad().is_view());
  EXPECT_NO_THROW(model.parameters[0].mutable_grad().detach_());
}

TEST(ReducerTest, FollowsTheStridesOfTheParameter) {
  for (const bool views : {true, false}) {
    run_ranks(2, [&](const Group& group) {
      ToyModel model({{2, 3, 4, 5}, {6, 4}});
      model.parameters[0] = at::ones({2, 3, 4, 5})
                                .contiguous(at::MemoryFormat::ChannelsLast)
                                .requires_grad_();
      model.parameters[1] = at::ones({4, 6}).t().requires_grad_();
      Reducer reducer(model.parameters, group,
                      {.gradient_as_bucket_view = views});
      for (int s = 0; s < 3; ++s) {
        model.zero_grad();
        step(reducer, model.loss(group->getRank(), s));
        expect_averaged(model, 2, s);
        for (const at::Tensor& p : model.parameters) {
          EXPECT_EQ(p.grad().strides(), p.strides());
        }
      }
      // A gradient with other strides.
      for (const at::Tensor& p : model.parameters) {
        p.mutable_grad() = at::zeros(p.sizes());
      }
      step(reducer, model.loss(group->getRank(), 7));
      expect_averaged(model, 2, 7);
    });
  }
}

// As by module.to(memory_format), on all ranks or on one, before a forward or
// between forward and backward. Buckets keep their order of elements.
TEST(ReducerTest, AParameterMayChangeItsMemoryFormat) {
  for (const bool views : {true, false}) {
    for (const bool kept : {true, false}) {
      for (const int only_rank : {-1, 1}) {
        run_ranks(2, [&](const Group& group) {
          const ToyModel model({{2, 3, 4, 5}, {6}});
          Reducer reducer(model.parameters, group,
                          {.gradient_as_bucket_view = views});
          const int rank = group->getRank();
          const at::Tensor& moved = model.parameters[0];
          for (int s = 0; s < 5; ++s) {
            model.zero_grad(/*set_to_none=*/!kept);
            const auto format = s % 2 == 0 ? at::MemoryFormat::ChannelsLast
                                           : at::MemoryFormat::Contiguous;
            const auto move = [&] {
              if (only_rank >= 0 && only_rank != rank) return;
              moved.set_data(moved.detach().contiguous(format));
            };
            if (s < 2) move();
            const at::Tensor slope =
                model.gradient(0, rank, s).contiguous(format);
            const at::Tensor loss =
                (moved * slope).sum() + model.loss_in_order({1}, rank, s);
            reducer.prepare_for_backward(loss);
            if (s >= 2) move();
            loss.backward();
            expect_averaged(model, 2, s);
          }
        });
      }
    }
  }
}

TEST(ReducerTest, AcceptsGradientsThatTheUserSwapped) {
  const std::vector<std::vector<std::vector<size_t>>> plans = {{{0, 1}},
                                                               {{0}, {1}}};
  for (const auto& plan : plans) {
    const ToyModel model({{3}, {3}});
    Reducer reducer(model.parameters, single_process_group(),
                    {.bucket_plan = plan});
    step(reducer, model.loss(0));
    const at::Tensor first = model.parameters[0].grad();
    model.parameters[0].mutable_grad() = model.parameters[1].grad();
    model.parameters[1].mutable_grad() = first;
    step(reducer, model.loss(0));
    for (const at::Tensor& p : model.parameters) {
      EXPECT_TRUE(
          at::equal(p.grad(), model.gradient(0, 0) + model.gradient(1, 0)));
    }
  }
}

TEST(ReducerTest, AcceptsGradientsWhoseDataTheUserReplaced) {
  run_ranks(2, [](const Group& group) {
    const ToyModel model({{2, 3}, {4}});
    Reducer reducer(model.parameters, group);
    const int rank = group->getRank();
    for (int s = 0; s < 3; ++s) {
      model.zero_grad();
      step(reducer, model.loss(rank));
      const at::Tensor& gradient = model.parameters[0].grad();
      model.parameters[0].mutable_grad().set_data(gradient * 3);
      step(reducer, model.loss(rank, 1));
      EXPECT_TRUE(at::equal(model.parameters[0].grad(),
                            3 * model.average(0, 2) + model.average(0, 2, 1)));
      EXPECT_TRUE(at::equal(model.parameters[1].grad(),
                            model.average(1, 2) + model.average(1, 2, 1)));
    }
  });
}

TEST(ReducerTest, RestoresAGradientThatWasResetDuringItsReduction) {
  for (const bool views : {true, false}) {
    run_ranks(2, [&](const Group& group) {
      const ToyModel model({{3}, {3}});
      Reducer reducer(
          model.parameters, group,
          {.bucket_plan = {{1}, {0}}, .gradient_as_bucket_view = views});
      const at::Tensor loss = model.loss_in_order({1, 0}, group->getRank());
      model.parameters[0].register_hook([&](const at::Tensor&) {
        model.parameters[1].mutable_grad().reset();
      });
      step(reducer, loss);
      expect_averaged(model, 2);
    });
  }
}
// Gradients of the local forward become ready before or after the backward
// reaches the prepared output.
TEST(ReducerTest, ReducesABackwardThroughAPreparedAndALocalForward) {
  for (const bool local_comes_first : {true, false}) {
    run_ranks(2, [&](const Group& group) {
      const ToyModel model({{3}, {4}, {2}});
      Reducer reducer(model.parameters, group);
      const int rank = group->getRank();
      at::Tensor prepared;
      at::Tensor local;
      const auto run_local = [&] { local = model.loss_in_order({2}, rank); };
      if (!local_comes_first) run_local();
      prepared = model.loss_in_order({0, 1}, rank);
      if (local_comes_first) run_local();
      reducer.prepare_for_backward(prepared);
      reducer.note_local_forward({local});
      (prepared + local).backward();
      expect_averaged(model, 2);
      EXPECT_EQ(reducer.statistics().reduced, 1);
    });
  }
}

TEST(ReducerTest, NamesMissingGradientsInTheNextLocalBackward) {
  run_ranks(2, [](const Group& group) {
    const ToyModel model({{3}, {4}, {2}});
    Reducer reducer(
        model.parameters, group,
        {.bucket_plan = {{0}, {1, 2}}, .parameter_names = model.names});
    const int rank = group->getRank();
    const at::Tensor loss = model.loss_in_order({0, 1}, rank);
    step(reducer, loss);
    const at::Tensor local = model.loss_in_order({2, 0}, rank);
    reducer.note_local_forward({local});
    try {
      local.backward();
      FAIL() << "accepted";
    } catch (const c10::Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("got no gradient in iteration 1"));
      EXPECT_THAT(error.what(), HasSubstr("'p2'"));
    }
    model.zero_grad();
    step(reducer, model.loss(rank));
    expect_averaged(model, 2);
  });
}

TEST(ReducerTest, ReducesNothingWhileAllParametersAreFrozen) {
  for (const bool find_unused : {true, false}) {
    const ToyModel model({{3}, {4}});
    Reducer reducer(model.parameters, single_process_group(),
                    {.find_unused_parameters = find_unused});
    const at::Tensor input = at::ones({}).requires_grad_();
    for (const at::Tensor& p : model.parameters) p.set_requires_grad(false);
    const at::Tensor loss = model.loss(0) * input;
    step(reducer, loss);
    EXPECT_EQ(reducer.statistics().reduced, 0);
    for (const at::Tensor& p : model.parameters) p.set_requires_grad(true);
    step(reducer, model.loss(0));
    EXPECT_EQ(reducer.statistics().reduced, 1);
  }
}

TEST(ReducerTest, CountsIterationsByBackwardsAndNotByForwards) {
  run_ranks(2, [](const Group& group) {
    const ToyModel model({{3}, {4}});
    Reducer reducer(model.parameters, group);
    const int rank = group->getRank();
    for (int s = 0; s < 3; ++s) {
      model.zero_grad();
      for (int i = 0; i < rank * 2; ++i) {
        reducer.prepare_for_backward(model.loss(rank, s));  // for a log
      }
      step(reducer, model.loss(rank, s));
      expect_averaged(model, 2, s);
    }
    EXPECT_EQ(reducer.statistics().begun, 3);
  });
}

// A comm hook queues a callback of the backward that completes its work.
TEST(ReducerTest, DeliversAfterCallbacksThatHooksHaveQueued) {
  const ToyModel model({{3}, {4}});
  auto hook = make_comm_hook([&](c10d::GradBucket& bucket) {
    torch::autograd::Engine::get_default_engine().queue_callback(
        [buffer = bucket.getBuffer()] { at::Tensor(buffer).mul_(2); });
    return testing::completed(bucket.getBuffer());
  });
  Reducer reducer(model.parameters, single_process_group(),
                  {.gradient_as_bucket_view = false, .comm_hook = hook});
  step(reducer, model.loss(0));
  EXPECT_TRUE(at::equal(model.parameters[0].grad(), 2 * model.gradient(0, 0)));
}

TEST(ReducerTest, GivesEmptyParametersThatAPeerUsedAnEmptyGradient) {
  for (const bool alone : {true, false}) {
    run_ranks(2, [&](const Group& group) {
      const ToyModel model({{0}, {3}});
      ReducerOptions options = {.find_unused_parameters = true};
      options.bucket_plan = alone ? std::vector<std::vector<size_t>>{{0}, {1}}
                                  : std::vector<std::vector<size_t>>{{0, 1}};
      Reducer reducer(model.parameters, group, options);
      const int rank = group->getRank();
      using Order = std::vector<size_t>;
      step(reducer,
           model.loss_in_order(rank == 0 ? Order{1} : Order{0, 1}, rank));
      ASSERT_TRUE(model.parameters[0].grad().defined());
      EXPECT_EQ(model.parameters[0].grad().numel(), 0);
      EXPECT_EQ(reducer.statistics().buckets_skipped, alone ? 1 : 0);
    });
  }
}

TEST(ReducerTest, TreatsGradientsSetToNoneByTheUserAtAnyTimeAsZero) {
  run_ranks(2, [&](const Group& group) {
    const ToyModel model({{3}, {3}});
    Reducer reducer(model.parameters, group, {.bucket_plan = {{1, 0}}});
    const at::Tensor loss = model.loss_in_order({1, 0}, group->getRank());
    // Parameter 1 is ready first and then loses its gradient on both ranks.
    model.parameters[0].register_hook(
        [&](const at::Tensor&) { model.parameters[1].mutable_grad().reset(); });
    step(reducer, loss);
    EXPECT_TRUE(at::equal(model.parameters[0].grad(), model.average(0, 2)));
    EXPECT_TRUE(at::equal(model.parameters[1].grad(), at::zeros({3})));
  });
}

TEST(ReducerTest, PutsEachDtypeIntoItsOwnBucket) {
  run_ranks(2, [&](const Group& group) {
    ToyModel model({{2}, {3}, {4}});
    model.parameters[1] = at::ones({3}, at::kDouble).requires_grad_();
    model.parameters[2] = at::ones({4}, at::kComplexFloat).requires_grad_();
    Reducer reducer(model.parameters, group);
    EXPECT_EQ(reducer.plan().num_buckets(), 3);
    for (int s = 0; s < 2; ++s) {
      model.zero_grad();
      step(reducer, model.loss(group->getRank(), s));
      expect_averaged(model, 2, s);
    }
  });
}

TEST(ReducerTest, PutsSparseGradientsIntoTheirOwnBucket) {
  run_ranks(2, [&](const Group& group) {
    const at::Tensor table = at::ones({5, 2}).requires_grad_();
    const at::Tensor dense = at::ones({2}).requires_grad_();
    Reducer reducer({table, dense}, group,
                    {.expect_sparse_gradients = {true, false}});
    EXPECT_EQ(reducer.plan().num_buckets(), 2);
    for (int s = 0; s < 2; ++s) {
      table.mutable_grad().reset();
      dense.mutable_grad().reset();
      const at::Tensor rows = at::tensor({1, 2 + group->getRank()}, at::kLong);
      step(reducer,
           (torch::embedding(table, rows, -1, false, /*sparse=*/true) * dense)
               .sum());
      ASSERT_TRUE(table.grad().is_sparse());
      at::Tensor expected = at::zeros({5, 2});
      expected.select(0, 1).fill_(1);
      expected.select(0, 2).fill_(0.5);
      expected.select(0, 3).fill_(0.5);
      EXPECT_TRUE(at::equal(table.grad().to_dense(), expected));
      EXPECT_TRUE(at::equal(dense.grad(), at::full({2}, 2.0)));
    }
  });
}

TEST(ReducerTest, ReducesBackwardThatCreatesAGraph) {
  for (const bool views : {true, false}) {
    run_ranks(2, [&](const Group& group) {
      const at::Tensor weight = at::full({2}, 3.0).requires_grad_();
      Reducer reducer({weight}, group, {.gradient_as_bucket_view = views});
      const double rank_factor = 2.0 * (group->getRank() + 1);
      const at::Tensor loss = (weight * weight * rank_factor).sum();
      reducer.prepare_for_backward(loss);
      loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true);
      // The average of 2 * 3 * {2, 4}, with a graph that leads to the weight.
      EXPECT_TRUE(at::equal(weight.grad().detach(), at::full({2}, 18.0)));
      ASSERT_TRUE(weight.grad().requires_grad());
      const auto second =
          torch::autograd::grad({weight.grad().sum()}, {weight});
      EXPECT_TRUE(at::equal(second[0], at::full({2}, 2 * rank_factor)));
      weight.mutable_grad().reset();
    });
  }
}

TEST(ReducerTest, RemovesItsHooksWhenDestroyedWithALiveGraph) {
  const ToyModel model(ToyModel::Sizes{{3}});
  auto reducer =
      std::make_unique<Reducer>(model.parameters, single_process_group());
  const at::Tensor loss = model.loss(0);
  reducer->prepare_for_backward(loss);
  reducer.reset();
  EXPECT_NO_THROW(loss.backward());
  EXPECT_TRUE(at::equal(model.parameters[0].grad(), model.gradient(0, 0)));
  Reducer second(model.parameters, single_process_group());
  model.zero_grad();
  step(second, model.loss(0));
  expect_averaged(model, 1);
}

TEST(ReducerTest, RebuildsOnceButNotWithFindUnusedParameters) {
  for (const bool rebuild : {true, false}) {
    RecordingGroup recording(2);
    const ToyModel model({{1}, {1}, {1}});
    Reducer reducer(model.parameters, recording.group(),
                    {.find_unused_parameters = !rebuild});
    const size_t before = recording.log().size();
    for (int s = 0; s < 4; ++s) {
      model.zero_grad();
      step(reducer, model.loss_in_order({1, 2, 0}, 0));
    }
    EXPECT_EQ(reducer.statistics().rebuilds, rebuild ? 1 : 0);
    EXPECT_THAT(reducer.plan().buckets().front(),
                rebuild ? ElementsAre(1, 2, 0) : ElementsAre(2, 1, 0));
    // One bucket a step; and the order, or each step's used-parameter bitmap.
    EXPECT_EQ(recording.log().size() - before, rebuild ? 5 : 8);
  }
}

// Counts the allocations of CPU tensors on one thread.
class AllocationCounter final : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void* /*ptr*/, int64_t alloc_size, size_t, size_t,
                         c10::Device) override {
    if (alloc_size > 0) {
      ++count;
      bytes += alloc_size;
    }
  }
  bool memoryProfilingEnabled() const override { return true; }

  int64_t count = 0;
  int64_t bytes = 0;
};

TEST(ReducerTest, AllocatesNothingAfterTheSecondStep) {
  for (const bool views : {true, false}) {
    for (const bool fp16 : {true, false}) {
      const ToyModel model({{100}, {28}, {3, 3}});
      auto step_allocations = [&](Reducer* reducer, int s) {
        auto counter = std::make_shared<AllocationCounter>();
        const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE,
                                        counter);
        const at::Tensor loss = model.loss(0, s);
        if (reducer) reducer->prepare_for_backward(loss);
        loss.backward();
        model.zero_grad();
        return counter->count;
      };
      const int64_t alone = step_allocations(nullptr, 0);
      ASSERT_GT(alone, 0);
      const auto group = single_process_group();
      Reducer reducer(
          model.parameters, group,
          {.gradient_as_bucket_view = views,
           .comm_hook = fp16 ? fp16_hook(group) : all_reduce_hook(group)});
      for (int s = 0; s < 2; ++s) step_allocations(&reducer, s);
      for (int s = 2; s < 6; ++s) {
        EXPECT_EQ(step_allocations(&reducer, s), alone)
            << "views " << views << " fp16 " << fp16;
      }
    }
  }
}

TEST(ReducerTest, PreparesWhileSparseGradientsAreKept) {
  const at::Tensor table = at::ones({4, 2}).requires_grad_();
  const at::Tensor weight = at::ones({2}).requires_grad_();
  Reducer reducer({table, weight}, single_process_group(),
                  {.expect_sparse_gradients = {true, false}});
  for (int s = 0; s < 3; ++s) {
    const at::Tensor rows = torch::embedding(table, at::tensor({1}), -1, false,
                                             /*sparse=*/true);
    step(reducer, (rows * weight).sum());
    EXPECT_TRUE(at::equal(table.grad().to_dense()[1], at::full({2}, s + 1.0)));
  }
}

TEST(ReducerTest, KeepsAnExplicitPlanAndRebuildsFirstBuckets) {
  using Buckets = std::vector<std::vector<size_t>>;
  const Buckets given = {{0, 1, 2}};
  for (const bool is_plan : {true, false}) {
    const ToyModel model({{2}, {3}, {4}});
    ReducerOptions options = {.bucket_cap_bytes = {1}};
    if (is_plan) options.bucket_plan = given;
    Reducer reducer(model.parameters, single_process_group(), options,
                    is_plan ? Buckets() : given);
    EXPECT_EQ(reducer.plan().buckets(), given);
    step(reducer, model.loss_in_order({1, 0, 2}, 0));
    EXPECT_EQ(reducer.rebuild_buckets(), !is_plan);
    EXPECT_FALSE(reducer.rebuild_buckets());
    EXPECT_EQ(reducer.plan().buckets(),
              is_plan ? given : Buckets({{1}, {0}, {2}}));
  }
}

TEST(ReducerTest, ConstructionNeedNotCommunicate) {
  const ToyModel model({{2}, {3}});
  RecordingGroup recording(2);
  Reducer reducer(model.parameters, recording.group(),
                  {.verify_across_ranks = false});
  EXPECT_EQ(recording.log().size(), 0);
  EXPECT_THROW(Reducer({at::ones({2})}, recording.group(),
                       {.verify_across_ranks = false}),
               c10::ValueError);
}
TEST(ReducerTest, HigherDerivativesThroughAReducedIterationAreLocal) {
  const ToyModel model({{2}, {3}});
  Reducer reducer(model.parameters, single_process_group());
  at::Tensor y = at::zeros({});
  for (const at::Tensor& p : model.parameters) y = y + p.pow(3).sum();
  reducer.prepare_for_backward(y);
  y.backward({}, /*retain_graph=*/true, /*create_graph=*/true);
  at::Tensor penalty = at::zeros({});
  for (const at::Tensor& p : model.parameters) {
    penalty = penalty + p.grad().pow(2).sum();
  }
  model.zero_grad();
  penalty.backward();
  // d/dp (3p^2)^2 = 36 p^3, and p is 1
  EXPECT_TRUE(at::equal(model.parameters[0].grad(), at::full({2}, 36.0)));
}

}  // namespace reducer_test
}  // namespace brigade
