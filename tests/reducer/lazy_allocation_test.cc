// Buckets that have memory only while gradients travel.

#include <ATen/ops/equal.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "brigade/comm/process_group.h"
#include "brigade/comm_hooks/comm_hooks.h"
#include "brigade/reducer/reducer.h"
#include "brigade/tests/reducer/failing.h"
#include "brigade/tests/reducer/toy_model.h"
#include "brigade/tests/support/local_ranks.h"
#include "gtest/gtest.h"

namespace brigade {
namespace lazy_allocation_test {

using testing::run_ranks;
using testing::step;
using testing::ToyModel;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

constexpr int kRanks = 2;

struct Mode {
  std::string name;
  ReducerOptions options = {};
  bool keeps_gradients = false;  // zeroed in place from step to step
};

void PrintTo(const Mode& mode, std::ostream* out) { *out << mode.name; }

ReducerOptions lazy(ReducerOptions options) {
  options.bucket_caps_bytes = {20};
  options.lazy_bucket_allocation = true;
  return options;
}

class LazyAllocationTest : public ::testing::TestWithParam<Mode> {};

TEST_P(LazyAllocationTest, TrainsToTheSameGradients) {
  run_ranks(kRanks, [](const Group& group) {
    const ToyModel model({{3}, {2, 2}, {5}, {1}});
    Reducer reducer(model.parameters, group, lazy(GetParam().options));
    for (int s = 0; s < 4; ++s) {
      model.zero_grad(/*set_to_none=*/!GetParam().keeps_gradients);
      step(reducer, model.loss(group->getRank(), s));
      testing::expect_averaged(model, kRanks, s);
    }
  });
}

// On a group without threads, which may hold a buffer a little longer.
TEST_P(LazyAllocationTest, KeepsNoBucketBeyondItsGradients) {
  const Group group = single_process_group();
  const ToyModel model({{3}, {2, 2}, {5}, {1}});
  ReducerOptions options = lazy(GetParam().options);
  std::vector<WeakStorage> buckets;
  options.comm_hook = make_comm_hook(
      [&buckets, average = all_reduce_hook(group)](c10d::GradBucket& bucket) {
        buckets.emplace_back(
            bucket.getBufferRef().storage().getWeakStorageImpl());
        return average->runHook(bucket);
      });
  Reducer reducer(model.parameters, group, options);
  for (int s = 0; s < 3; ++s) {
    step(reducer, model.loss(0, s));
    EXPECT_GT(buckets.size(), 1U);
    for (const WeakStorage& bucket : buckets) {
      EXPECT_EQ(bucket.expired(), !GetParam().options.gradient_as_bucket_view);
    }
    model.zero_grad();
    for (const WeakStorage& bucket : buckets) EXPECT_TRUE(bucket.expired());
    buckets.clear();
  }
}

INSTANTIATE_TEST_SUITE_P(
    Modes, LazyAllocationTest,
    ::testing::Values(
        Mode{.name = "Views"},
        Mode{.name = "ViewsThatStay", .keeps_gradients = true},
        Mode{.name = "Copies", .options = {.gradient_as_bucket_view = false}},
        Mode{.name = "CopiesThatStay",
             .options = {.gradient_as_bucket_view = false},
             .keeps_gradients = true},
        Mode{.name = "Unused", .options = {.find_unused_parameters = true}},
        Mode{.name = "Static", .options = {.static_graph = true}}),
    [](const auto& info) { return info.param.name; });

// A gradient in the memory of a bucket that was let go is one like any other.
TEST(LazyGradientsTest, AccumulateLocallyAndStayWhereNobodyUsesThem) {
  run_ranks(kRanks, [](const Group& group) {
    const int rank = group->getRank();
    const ToyModel model({{3}, {2}});
    Reducer reducer(model.parameters, group,
                    lazy({.find_unused_parameters = true}));
    step(reducer, model.loss(rank, 0));
    model.loss(rank, 1).backward();  // not reduced
    step(reducer, model.loss_in_order({0}, rank, 2));
    // The average of what ranks hold, which is an average and a rank's own.
    EXPECT_TRUE(
        at::equal(model.parameters[0].grad(), model.average(0, kRanks, 0) +
                                                  model.average(0, kRanks, 1) +
                                                  model.average(0, kRanks, 2)));
    EXPECT_TRUE(
        at::equal(model.parameters[1].grad(),
                  model.average(1, kRanks, 0) + model.average(1, kRanks, 1)));
    const at::Tensor before = model.parameters[1].grad().clone();
    step(reducer, model.loss_in_order({0}, rank, 3));
    EXPECT_TRUE(at::equal(model.parameters[1].grad(), before));
  });
}

TEST(LazyGradientsTest, OfARankThatShadowsStay) {
  run_ranks(kRanks, [](const Group& group) {
    const int rank = group->getRank();
    const ToyModel model({{3}, {2}});
    Reducer reducer(model.parameters, group, lazy({}));
    step(reducer, model.loss(rank, 0));
    const at::Tensor before = model.parameters[0].grad().clone();
    if (rank == 0) {
      reducer.shadow_iteration();
      EXPECT_TRUE(at::equal(model.parameters[0].grad(), before));
    } else {
      model.zero_grad();
      step(reducer, model.loss(rank, 1));
      EXPECT_TRUE(at::equal(model.parameters[0].grad(),
                            model.gradient(0, rank, 1) / kRanks));
    }
    model.zero_grad();
    step(reducer, model.loss(rank, 2));
    EXPECT_TRUE(
        at::equal(model.parameters[1].grad(), model.average(1, kRanks, 2)));
  });
}

}  // namespace lazy_allocation_test
}  // namespace brigade
