// Reduction in shared memory by a reducer's default hook, with all ranks on one
// host.

#include "brigade/comm/ordered/host_sums.h"

#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "brigade/comm_hooks/comm_hooks.h"
#include "brigade/comm_hooks/hook_traits.h"
#include "brigade/reducer/reducer.h"
#include "brigade/tests/reducer/failing.h"
#include "brigade/tests/reducer/toy_model.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace reducer_host_sums_test {

using testing::expect_trains;
using testing::run_ranks;
using testing::step;
using testing::ToyModel;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

const ToyModel::Sizes kSizes = {{2}, {3}, {5}};
const std::vector<std::vector<size_t>> kOneEach = {{2}, {1}, {0}};

// Returns the number of buckets reduced in shared memory in `num_steps` steps.
int64_t num_in_memory(Reducer& reducer, const ToyModel& model,
                      const Group& group, int num_steps = 2) {
  const int64_t before = HostSums::num_launches(*group);
  for (int s = 0; s < num_steps; ++s) {
    expect_trains(reducer, model, group->getRank(), group->getSize(), s);
  }
  return HostSums::num_launches(*group) - before;
}

TEST(HostSumsOfReducersTest, DefaultHookReducesInSharedMemory) {
  for (const int world_size : {2, 3}) {
    run_ranks(world_size, [](const Group& group) {
      const ToyModel model(kSizes);
      Reducer reducer(model.parameters, group, {.bucket_plan = kOneEach});
      EXPECT_EQ(num_in_memory(reducer, model, group), 6);
    });
  }
}

TEST(HostSumsOfReducersTest, SupportsComplexAndHalfGradients) {
  for (const at::ScalarType dtype : {at::kComplexFloat, at::kBFloat16}) {
    run_ranks(2, [dtype](const Group& group) {
      const ToyModel model({{2}}, dtype);
      Reducer reducer(model.parameters, group);
      EXPECT_EQ(num_in_memory(reducer, model, group), 2);
    });
  }
}

// Both hooks have the same wire format, so comparing options finds no
// difference.
TEST(HostSumsOfReducersTest, AHookOnOneRankDisablesSharedMemory) {
  run_ranks(2, [](const Group& group) {
    const ToyModel model(kSizes);
    ReducerOptions options = {.bucket_plan = kOneEach};
    if (group->getRank() == 1) options.comm_hook = all_reduce_hook(group);
    Reducer reducer(model.parameters, group, options);
    EXPECT_EQ(num_in_memory(reducer, model, group), 0);
  });
}

TEST(HostSumsOfReducersTest, OtherHooksUseTheGroup) {
  run_ranks(2, [](const Group& group) {
    const ToyModel model(kSizes);
    Reducer reducer(
        model.parameters, group,
        {.bucket_plan = kOneEach, .comm_hook = all_reduce_hook(group)});
    EXPECT_EQ(num_in_memory(reducer, model, group), 0);
    Reducer reproducible(model.parameters, group,
                         {.bucket_plan = kOneEach, .reproducible = true});
    EXPECT_EQ(HostSums::num_launches(*group), 0);
  });
}

TEST(HostSumsOfReducersTest, WorksAgainAfterAHookIsRemoved) {
  run_ranks(2, [](const Group& group) {
    const ToyModel model(kSizes);
    Reducer reducer(model.parameters, group, {.bucket_plan = kOneEach});
    reducer.set_comm_hook(all_reduce_hook(group));
    EXPECT_EQ(num_in_memory(reducer, model, group), 0);
    reducer.set_comm_hook(nullptr);
    EXPECT_EQ(num_in_memory(reducer, model, group), 6);
  });
}

TEST(HostSumsOfReducersTest, NeedsComparedRanks) {
  run_ranks(2, [](const Group& group) {
    const ToyModel model(kSizes);
    Reducer reducer(model.parameters, group,
                    {.bucket_plan = kOneEach, .verify_across_ranks = false});
    EXPECT_EQ(num_in_memory(reducer, model, group), 0);
  });
}

TEST(HostSumsOfReducersTest, SupportsOptimizersThatStepInBackward) {
  run_ranks(2, [](const Group& group) {
    const ToyModel model(kSizes);
    const auto nothing = [](const at::Tensor&) {};
    Reducer reducer(
        model.parameters, group,
        {.bucket_plan = kOneEach,
         .comm_hook = step_in_backward(default_hook(group), nothing)});
    step(reducer, model.loss(group->getRank()));
    EXPECT_EQ(HostSums::num_launches(*group), 3);
  });
}

// Shared memory does not use the group, so the ranks' orders may differ.
TEST(HostSumsOfReducersTest, OrderWithTheGroupsCollectivesMayDiffer) {
  run_ranks(2, [](const Group& group) {
    const ToyModel model(kSizes);
    Reducer reducer(model.parameters, group, {.bucket_plan = kOneEach});
    std::vector<at::Tensor> ones = {at::ones({4})};
    const size_t parameter = group->getRank() == 0 ? 2 : 0;
    model.parameters[parameter].register_hook(
        [&](const at::Tensor&) { group->allreduce(ones)->wait(); });
    step(reducer, model.loss(group->getRank()));
    EXPECT_EQ(ones[0][0].item<int>(), 2);
    for (size_t i = 0; i < model.parameters.size(); ++i) {
      EXPECT_TRUE(at::equal(model.parameters[i].grad(), model.average(i, 2)));
    }
  });
}

}  // namespace reducer_host_sums_test
}  // namespace brigade
