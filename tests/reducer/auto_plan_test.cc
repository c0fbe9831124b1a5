#include "brigade/reducer/auto_plan.h"

#include <c10/core/thread_pool.h>
#include <torch/torch.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "brigade/reducer/reducer.h"
#include "brigade/tests/support/identical_ranks_backend.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::brigade::testing::run_ranks;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

constexpr int kIterations = 14;

// A sum of parameters with integer weights: gradients are exact.
struct Sum {
  explicit Sum(int size, int64_t smallest = 50) {
    for (int i = 0; i < size; ++i) {
      parameters.push_back(torch::zeros({smallest + i}).requires_grad_());
    }
  }

  at::Tensor forward(int factor) const {
    at::Tensor sum = torch::zeros({});
    for (size_t i = 0; i < parameters.size(); ++i) {
      sum = sum + parameters[i].sum() * static_cast<double>((i + 1) * factor);
    }
    return sum;
  }

  // `average`: of the ranks' factors.
  void expect_gradients(double average) const {
    for (size_t i = 0; i < parameters.size(); ++i) {
      const double expected = static_cast<double>(i + 1) * average;
      EXPECT_TRUE(parameters[i].grad().eq(expected).all().item<bool>()) << i;
    }
  }

  void zero_grad() const {
    for (const at::Tensor& parameter : parameters) {
      parameter.mutable_grad().reset();
    }
  }

  std::vector<at::Tensor> parameters;
};

struct Result {
  std::string report;
  std::vector<std::vector<size_t>> buckets;
  int64_t rebuilds = 0;
};

// Trains with one bucket per parameter as the default.
Result train(const Group& group, ReducerOptions options) {
  const Sum net(30);
  options.bucket_cap_bytes = {1};
  Reducer reducer(net.parameters, group, options);
  const auto plan = AutoPlan::attach(reducer, net.parameters, {}, group);
  const int rank = group->getRank();
  for (int iteration = 1; iteration <= kIterations; ++iteration) {
    EXPECT_EQ(plan->is_done(), !plan->report().empty());
    const at::Tensor loss = net.forward(rank + iteration);
    reducer.prepare_for_backward(loss);
    loss.backward();
    net.expect_gradients(iteration + (group->getSize() - 1) / 2.0);
    net.zero_grad();
  }
  EXPECT_TRUE(plan->is_done());
  return {plan->report(), reducer.plan().buckets(),
          reducer.statistics().rebuilds};
}

// The times of a run decide between the plans; all ranks decide the same.
class AutoPlanTest : public ::testing::TestWithParam<int> {
 protected:
  static void expect_equal_ends(const ReducerOptions& options) {
    std::mutex mutex;
    std::vector<Result> results;
    run_ranks(GetParam(), [&](const Group& group) {
      Result result = train(group, options);
      const std::lock_guard lock(mutex);
      results.push_back(std::move(result));
    });
    ASSERT_EQ(results.size(), static_cast<size_t>(GetParam()));
    for (const Result& result : results) {
      EXPECT_EQ(result.report, results[0].report);
      EXPECT_EQ(result.buckets, results[0].buckets);
    }
    EXPECT_THAT(results[0].report,
                AnyOf(StartsWith("took "), StartsWith("did not take "),
                      StartsWith("kept the 30 buckets of the default")));
    EXPECT_THAT(results[0].report, HasSubstr("no plan is below"));
    EXPECT_THAT(results[0].report, Not(HasSubstr("too few iterations")));
    if (results[0].report.starts_with("took ")) {
      EXPECT_LT(results[0].buckets.size(), 30U);
    } else {
      EXPECT_EQ(results[0].buckets.size(), 30U);
    }
  }
};

TEST_P(AutoPlanTest, EndsWithTheSamePlanOnAllRanks) { expect_equal_ends({}); }

TEST_P(AutoPlanTest, FollowsAStaticGraph) {
  expect_equal_ends({.static_graph = true});
}

TEST_P(AutoPlanTest, AllowsUnusedParameters) {
  expect_equal_ends({.find_unused_parameters = true});
}

// A delay of 50 ms is far above the steps of this test.
TEST_P(AutoPlanTest, PlansAgainWhenStepsTakeLonger) {
  run_ranks(GetParam(), [](const Group& group) {
    const Sum net(30);
    Reducer reducer(net.parameters, group, {.bucket_cap_bytes = {1}});
    reducer.set_timeline_sample_rate(1);
    constexpr int64_t kWatched = 4;
    const auto plan =
        AutoPlan::attach(reducer, net.parameters, {}, group, kWatched);
    bool is_slow = false;
    net.parameters[0].register_hook([&](const at::Tensor&) {
      if (is_slow) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    });
    bool has_planned_again = false;
    for (int iteration = 1; iteration <= 6 * kIterations; ++iteration) {
      is_slow = iteration > 2 * kIterations;
      if (is_slow && !plan->is_done()) has_planned_again = true;
      const at::Tensor loss = net.forward(group->getRank() + iteration);
      reducer.prepare_for_backward(loss);
      loss.backward();
      net.expect_gradients(iteration + (group->getSize() - 1) / 2.0);
      net.zero_grad();
    }
    EXPECT_TRUE(has_planned_again);
  });
}

TEST_P(AutoPlanTest, GoesOnAfterFailedIterations) {
  run_ranks(GetParam(), [](const Group& group) {
    const Sum net(8);
    Reducer reducer(net.parameters, group, {.bucket_cap_bytes = {1}});
    const auto plan = AutoPlan::attach(reducer, net.parameters, {}, group);
    const bool fails = group->getRank() == 1;
    for (int iteration = 1; iteration <= 2 * kIterations; ++iteration) {
      at::Tensor loss = net.forward(1);
      reducer.prepare_for_backward(loss);
      if (iteration % 2 == 0) {
        loss.backward();
        net.expect_gradients(1);
      } else {
        const auto handle = net.parameters[3].register_hook(
            [fails](const at::Tensor& gradient) {
              if (fails) throw std::runtime_error("a bad batch");
              return gradient;
            });
        EXPECT_ANY_THROW(loss.backward());
        net.parameters[3].remove_hook(handle);
      }
      net.zero_grad();
    }
    EXPECT_TRUE(plan->is_done());
  });
}

// ---- The decision, with simulated times that are far apart

using Time = std::chrono::duration<double>;

// Runs one all-reduce after the other: each takes `latency`, and `per_byte` for
// each byte.
class SlowLink final : public IdenticalRanksBackend {
 public:
  SlowLink() : IdenticalRanksBackend(/*rank=*/0, /*world_size=*/2) {}

  std::atomic<Time> latency = Time(0);
  std::atomic<Time> per_byte = Time(0);

 protected:
  WorkPtr launch(CollectiveCall call, std::function<void()> compute) override {
    Time time = latency;
    for (const at::Tensor& input : call.inputs) {
      time += per_byte.load() * static_cast<double>(input.nbytes());
    }
    const auto work = c10::make_intrusive<AnsweredWork>(call);
    link_.run([work, time, compute = std::move(compute)] {
      std::this_thread::sleep_for(time);
      work->answer(compute);
    });
    return work;
  }

 private:
  c10::ThreadPool link_{1};
};

class AutoPlanDecisionTest : public ::testing::Test {
 protected:
  AutoPlanDecisionTest()
      : group_(c10::make_intrusive<c10d::ProcessGroup>(0, 2)) {
    group_->setBackend(at::kCPU, c10d::ProcessGroup::BackendType::CUSTOM,
                       link_);
    group_->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  }

  // Calls `before` with the number of buckets before each iteration.
  Result train(const Sum& net, int64_t cap_bytes,
               const std::function<void(size_t)>& before = nullptr) {
    Reducer reducer(net.parameters, group_, {.bucket_cap_bytes = {cap_bytes}});
    const auto plan = AutoPlan::attach(reducer, net.parameters, {}, group_);
    for (int iteration = 1; iteration <= kIterations; ++iteration) {
      if (before) before(reducer.plan().buckets().size());
      const at::Tensor loss = net.forward(iteration);
      reducer.prepare_for_backward(loss);
      loss.backward();
      net.expect_gradients(iteration);
      net.zero_grad();
    }
    return {plan->report(), reducer.plan().buckets()};
  }

  const c10::intrusive_ptr<SlowLink> link_ = c10::make_intrusive<SlowLink>();
  const Group group_;
};

TEST_F(AutoPlanDecisionTest, MergesBucketsWhereLatencyIsHigh) {
  link_->latency = Time(2e-3);
  const Result result = train(Sum(30), /*cap_bytes=*/1);
  EXPECT_THAT(result.report, StartsWith("took "));
  EXPECT_LT(result.buckets.size(), 6U);
}

TEST_F(AutoPlanDecisionTest, SplitsBucketsThatALongBackwardCanHide) {
  const Sum net(4, /*smallest=*/2000);
  link_->per_byte = Time(15e-3 / 8000);  // 15 ms for a parameter
  for (const at::Tensor& parameter : net.parameters) {
    parameter.register_hook([](const at::Tensor& /*gradient*/) {
      std::this_thread::sleep_for(Time(20e-3));
    });
  }
  const Result result = train(net, /*cap_bytes=*/1 << 20);
  EXPECT_THAT(result.report, StartsWith("took 4 buckets"));
  EXPECT_THAT(result.report, HasSubstr("3 of 4 all-reduces hidden"));
  EXPECT_THAT(result.report, HasSubstr("instead of 1:"));
}

TEST_F(AutoPlanDecisionTest, KeepsTheDefaultIfThePlanIsPredictedToBeNoFaster) {
  const Result result = train(Sum(1), /*cap_bytes=*/1);
  EXPECT_THAT(result.report, StartsWith("kept the 1 bucket of the default"));
}

TEST_F(AutoPlanDecisionTest, ReturnsToTheDefaultIfThePlanIsSlower) {
  const Result result =
      train(Sum(30), /*cap_bytes=*/1, [this](size_t num_buckets) {
        link_->latency = Time(num_buckets == 30 ? 0 : 30e-3);
      });
  EXPECT_THAT(result.report, StartsWith("did not take "));
  EXPECT_EQ(result.buckets.size(), 30U);
}

TEST_P(AutoPlanTest, StopsWhereTheProgramSetsBuckets) {
  run_ranks(GetParam(), [](const Group& group) {
    for (const int at : {1, 3, 5, 9}) {
      const Sum net(4);
      Reducer reducer(net.parameters, group, {.bucket_cap_bytes = {1}});
      const auto plan = AutoPlan::attach(reducer, net.parameters, {}, group);
      const std::vector<std::vector<size_t>> own = {{3, 0}, {2, 1}};
      for (int iteration = 1; iteration <= kIterations; ++iteration) {
        const at::Tensor loss = net.forward(1);
        reducer.prepare_for_backward(loss);
        loss.backward();
        net.expect_gradients(1);
        net.zero_grad();
        if (iteration == at) reducer.set_bucket_plan(own);
      }
      EXPECT_EQ(reducer.plan().buckets(), own) << at;
      // Later it may be done, if it keeps the default.
      if (at <= 3) EXPECT_THAT(plan->report(), StartsWith("stopped")) << at;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, AutoPlanTest, ::testing::Values(2, 4));

TEST(SetBucketPlanTest, TakesEffectInTheNextIteration) {
  run_ranks(2, [](const Group& group) {
    const Sum net(4);
    Reducer reducer(net.parameters, group);
    for (const std::vector<std::vector<size_t>>& buckets :
         {std::vector<std::vector<size_t>>{{3, 2}, {1, 0}},
          std::vector<std::vector<size_t>>{{0}, {1}, {2}, {3}},
          std::vector<std::vector<size_t>>{{2, 0, 1, 3}}}) {
      reducer.set_bucket_plan(buckets);
      EXPECT_EQ(reducer.plan().buckets(), buckets);
      for (int step = 0; step < 2; ++step) {
        const at::Tensor loss = net.forward(group->getRank() + 1);
        reducer.prepare_for_backward(loss);
        loss.backward();
        net.expect_gradients(1.5);
        net.zero_grad();
      }
      EXPECT_EQ(reducer.plan().buckets(), buckets);
    }
  });
}

TEST(SetBucketPlanTest, RefusesInvalidPlansAndPlansThatDiffer) {
  run_ranks(2, [](const Group& group) {
    const Sum net(2);
    Reducer reducer(net.parameters, group);
    EXPECT_THROW(reducer.set_bucket_plan({{0}}), c10::ValueError);
    const at::Tensor loss = net.forward(1);
    reducer.prepare_for_backward(loss);
    loss.backward();
    try {
      reducer.set_bucket_plan(group->getRank() == 0
                                  ? std::vector<std::vector<size_t>>{{0, 1}}
                                  : std::vector<std::vector<size_t>>{{1, 0}});
      ADD_FAILURE() << "expected an error";
    } catch (const c10::Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("same plan and options"));
    }
  });
}

}  // namespace
}  // namespace brigade
