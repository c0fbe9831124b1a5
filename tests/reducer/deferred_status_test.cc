// Iterations that are delivered before all ranks are known to have ended them,
// and reducers whose ranks tell each other nothing.

#include <c10/util/Exception.h>
#include <torch/torch.h>

#include <atomic>
#include <functional>
#include <latch>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/comm/recording_group.h"
#include "brigade/comm_hooks/function_hook.h"
#include "brigade/reducer/reducer.h"
#include "brigade/tests/reducer/failing.h"
#include "brigade/tests/reducer/step.h"
#include "brigade/tests/reducer/toy_model.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace deferred_status_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::run_ranks;
using ::testing::StartsWith;
using testing::step;
using testing::text_of;
using testing::throw_in_backward;
using testing::ToyModel;
using testing::UserError;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

const ToyModel::Sizes kSizes = {{2}, {3}, {5}};
const std::vector<std::vector<size_t>> kOneEach = {{2}, {1}, {0}};

void fail_in_backward(Reducer& reducer, const ToyModel& model, int rank,
                      int throws_at) {
  EXPECT_THROW(throw_in_backward(reducer, model, rank, throws_at), UserError);
}

void expect_trains(Reducer& reducer, const ToyModel& model, const Group& group,
                   int steps) {
  for (int s = 0; s < steps; ++s) {
    testing::expect_trains(reducer, model, group->getRank(), group->getSize(),
                           s);
  }
}

auto tells_of_iteration(int iteration, int num_behind = 0) {
  const std::string number = std::to_string(iteration);
  const std::string behind =
      num_behind == 0 ? ""
                      : ", and " + std::to_string(num_behind) + " behind it";
  return AllOf(
      StartsWith("Reducer: iteration " + number + behind +
                 ", whose results this rank has delivered"),
      HasSubstr("rank 1 failed in iteration " + number + " at launch "));
}

struct Mode {
  const char* name;
  ReducerOptions options;
};

class DeferredStatusTest : public ::testing::TestWithParam<Mode> {
 protected:
  ReducerOptions options() const {
    ReducerOptions options = GetParam().options;
    options.bucket_plan = kOneEach;
    options.defer_status_check = true;
    options.max_unconfirmed_iterations = 1;
    return options;
  }
};
INSTANTIATE_TEST_SUITE_P(
    Modes, DeferredStatusTest,
    ::testing::Values(Mode{"plain", {}},
                      Mode{"copies", {.gradients_as_bucket_views = false}},
                      Mode{"find_unused", {.find_unused_parameters = true}},
                      Mode{"skipping",
                           {.find_unused_parameters = true,
                            .skip_all_reduce_unused_parameters = true}},
                      Mode{"static_graph", {.static_graph = true}},
                      Mode{"rebuilding", {.rebuild_buckets = true}},
                      Mode{"lazy", {.lazy_bucket_allocation = true}}),
    [](const auto& info) { return std::string(info.param.name); });

// Also of the first one, from which ranks learn.
TEST_P(DeferredStatusTest, AFailureIsToldWhenTheNextIterationIsPrepared) {
  for (const int failing : {1, 3}) {
    for (int throws_at = -1; throws_at <= 3; ++throws_at) {
      SCOPED_TRACE("throws in iteration " + std::to_string(failing) + " at " +
                   std::to_string(throws_at));
      run_ranks(3, [&](const Group& group) {
        const ToyModel model(kSizes);
        Reducer reducer(model.parameters, group, options());
        expect_trains(reducer, model, group, /*steps=*/failing - 1);
        if (group->getRank() == 1) {
          fail_in_backward(reducer, model, 1, throws_at);
        } else {
          step(reducer, model.loss(group->getRank()));
          EXPECT_THAT(text_of<c10::DistBackendError>(
                          [&] { reducer.prepare_for_backward(model.loss(0)); }),
                      tells_of_iteration(failing));
        }
        EXPECT_TRUE(reducer.can_continue());
        expect_trains(reducer, model, group, /*steps=*/3);
      });
    }
  }
}

// Rank 1 ends its iteration only when rank 0 has come out of its backward.
TEST_P(DeferredStatusTest, ARankDoesNotWaitForItsPeersEnd) {
  std::latch rank_0_is_done(1);
  run_ranks(2, [&](const Group& group) {
    const ToyModel model(kSizes);
    Reducer reducer(model.parameters, group, options());
    expect_trains(reducer, model, group, /*steps=*/2);
    reducer.set_manual_finalization(group->getRank() == 1);
    model.zero_grad();
    step(reducer, model.loss(group->getRank()));
    if (group->getRank() == 0) {
      rank_0_is_done.count_down();
    } else {
      rank_0_is_done.wait();
      reducer.finalize_backward();
    }
    for (size_t i = 0; i < model.parameters.size(); ++i) {
      EXPECT_TRUE(
          at::equal(model.parameters[i].grad(), model.average(i, 2, 0)));
    }
  });
}

TEST_P(DeferredStatusTest, OtherCallsThatCommunicateLookAtIt) {
  const std::vector<std::function<void(Reducer&)>> calls = {
      [](Reducer& reducer) { reducer.recover(); },
      [](Reducer& reducer) { reducer.shadow_iteration(); },
      [](Reducer& reducer) { reducer.set_comm_hook(nullptr); }};
  for (const auto& call : calls) {
    run_ranks(2, [&](const Group& group) {
      const ToyModel model(kSizes);
      Reducer reducer(model.parameters, group, options());
      expect_trains(reducer, model, group, /*steps=*/2);
      if (group->getRank() == 1) {
        fail_in_backward(reducer, model, 1, /*throws_at=*/1);
      } else {
        step(reducer, model.loss(0));
        EXPECT_THAT(text_of<c10::DistBackendError>([&] { call(reducer); }),
                    tells_of_iteration(3));
      }
      expect_trains(reducer, model, group, /*steps=*/2);
    });
  }
}

// It would meet what the failed rank launches next.
TEST_P(DeferredStatusTest, ACollectiveInBetweenEndsTheGroupIfARankHasFailed) {
  std::latch rank_0_has_heard(1);
  run_ranks(2, [&](const Group& group) {
    const ToyModel model(kSizes);
    Reducer reducer(model.parameters, group, options());
    expect_trains(reducer, model, group, /*steps=*/2);
    if (group->getRank() == 1) {
      fail_in_backward(reducer, model, 1, /*throws_at=*/1);
      rank_0_has_heard.wait();
      EXPECT_ANY_THROW(step(reducer, model.loss(1)));
    } else {
      step(reducer, model.loss(0));
      std::vector<at::Tensor> own = {at::ones({2})};
      const auto work = group->allreduce(own);
      EXPECT_THAT(text_of<c10::DistBackendError>(
                      [&] { reducer.prepare_for_backward(model.loss(0)); }),
                  AllOf(tells_of_iteration(3),
                        HasSubstr("has launched other collectives")));
      rank_0_has_heard.count_down();
    }
    EXPECT_FALSE(reducer.can_continue());
  });
}

// The hook is another one on all ranks, also where it could not be said.
TEST_P(DeferredStatusTest, AHookIsSetWhateverIsHeardThen) {
  run_ranks(2, [&](const Group& group) {
    const ToyModel model(kSizes);
    Reducer reducer(model.parameters, group, options());
    expect_trains(reducer, model, group, /*steps=*/2);
    const auto before = reducer.comm_hook();
    if (group->getRank() == 1) {
      fail_in_backward(reducer, model, 1, /*throws_at=*/1);
      reducer.set_comm_hook(nullptr);
    } else {
      step(reducer, model.loss(0));
      EXPECT_THROW(reducer.set_comm_hook(nullptr), c10::DistBackendError);
    }
    EXPECT_NE(reducer.comm_hook(), before);
    expect_trains(reducer, model, group, /*steps=*/2);
  });
}

// Ranks would come to the same exchange with different things to say.
TEST(DeferredStatusOfSomeRanksTest, IsAnErrorOnAllRanks) {
  run_ranks(2, [](const Group& group) {
    const ToyModel model(kSizes);
    EXPECT_THAT(text_of<c10::ValueError>([&] {
                  Reducer(model.parameters, group,
                          {.defer_status_check = group->getRank() == 0});
                }),
                HasSubstr("defer_status_check = "));
  });
}

// What a user's hook returns may fail on one rank alone, and is not there when
// backward ends.
TEST(DeferredStatusOfHooksTest, AUsersHookOnTheCpuIsWaitedForInAnyCase) {
  run_ranks(2, [](const Group& group) {
    const ToyModel model(kSizes);
    int failing = 0;
    const auto hook = make_comm_hook([&](c10d::GradBucket& bucket) {
      std::vector<at::Tensor> tensors = {bucket.getBuffer().div_(2)};
      return group->allreduce(tensors)->getFuture()->then(
          [&failing](c10::ivalue::Future& reduced) {
            if (failing > 0) throw UserError("no disk");
            return reduced.value();
          },
          c10::AnyType::get());
    });
    Reducer reducer(model.parameters, group,
                    {.bucket_plan = kOneEach,
                     .defer_status_check = true,
                     .comm_hook = hook});
    expect_trains(reducer, model, group, /*steps=*/2);
    failing = group->getRank();
    EXPECT_THROW(step(reducer, model.loss(group->getRank())), std::exception);
    failing = 0;
    expect_trains(reducer, model, group, /*steps=*/2);
  });
}

// Ends of several iterations are outstanding.
class RunAheadTest
    : public ::testing::TestWithParam<std::tuple<const char*, int>> {
 protected:
  int depth() const { return std::get<int>(GetParam()); }

  ReducerOptions options() const {
    const std::string_view mode = std::get<const char*>(GetParam());
    return {.bucket_plan = kOneEach,
            .find_unused_parameters = mode == "find_unused",
            .static_graph = mode == "static_graph",
            .rebuild_buckets = mode == "rebuilding",
            .gradients_as_bucket_views = mode != "copies",
            .lazy_bucket_allocation = mode == "lazy",
            .defer_status_check = true,
            .max_unconfirmed_iterations = depth()};
  }
};
INSTANTIATE_TEST_SUITE_P(
    Modes, RunAheadTest,
    ::testing::Combine(::testing::Values("plain", "copies", "find_unused",
                                         "static_graph", "rebuilding", "lazy"),
                       ::testing::Values(1, 4)),
    [](const auto& info) {
      return absl::StrCat(std::get<const char*>(info.param), "_",
                          std::get<int>(info.param));
    });

// How many steps it makes until it hears of a failure in iteration 4, which is
// the first of them.
int steps_until_told_of_4(const std::function<void()>& step, int at_most) {
  int done = 0;
  const std::string text = text_of<c10::DistBackendError>([&] {
    while (done <= at_most) {
      step();
      ++done;
    }
  });
  EXPECT_THAT(text, tells_of_iteration(4, done - 1));
  return done;
}

TEST_P(RunAheadTest, AFailureIsToldAsManyIterationsLaterAtTheLatest) {
  for (int throws_at = -1; throws_at <= 3; ++throws_at) {
    SCOPED_TRACE("throws at " + std::to_string(throws_at));
    run_ranks(3, [&](const Group& group) {
      const ToyModel model(kSizes);
      Reducer reducer(model.parameters, group, options());
      expect_trains(reducer, model, group, /*steps=*/3);
      if (group->getRank() == 1) {
        fail_in_backward(reducer, model, 1, throws_at);
      } else {
        const int made = steps_until_told_of_4(
            [&] { step(reducer, model.loss(0)); }, depth());
        EXPECT_GE(made, 1);
        EXPECT_LE(made, depth());
      }
      EXPECT_TRUE(reducer.can_continue());
      expect_trains(reducer, model, group, /*steps=*/depth() + 2);
    });
  }
}

// Ranks learn from it.
TEST_P(RunAheadTest, AFailureOfTheFirstIterationIsTold) {
  run_ranks(2, [&](const Group& group) {
    const ToyModel model(kSizes);
    Reducer reducer(model.parameters, group, options());
    if (group->getRank() == 1) {
      fail_in_backward(reducer, model, 1, /*throws_at=*/1);
    } else {
      const auto train = [&] {
        for (int i = 0; i <= depth(); ++i) step(reducer, model.loss(0));
      };
      EXPECT_THAT(text_of<c10::DistBackendError>(train),
                  HasSubstr("rank 1 failed in iteration 1 at launch "));
    }
    EXPECT_TRUE(reducer.can_continue());
    expect_trains(reducer, model, group, /*steps=*/depth() + 2);
  });
}

// What a rank may do while ends are outstanding: each rank raises once, and
// all stand in the same place behind that.
TEST_P(RunAheadTest, RanksMayFailInDifferentIterations) {
  constexpr int kRanks = 3;
  run_ranks(kRanks, [&](const Group& group) {
    const ToyModel model(kSizes);
    Reducer reducer(model.parameters, group, options());
    expect_trains(reducer, model, group, /*steps=*/2);
    std::mt19937 random(7);  // the same on all ranks
    const auto draw = [&](int from, int to) {
      return std::uniform_int_distribution<int>(from, to)(random);
    };
    for (int round = 0; round < 25; ++round) {
      // In how many steps from here, and where; the first one is heard by all.
      std::vector<int> fails_in;
      std::vector<int> throws_at;
      for (int rank = 0; rank < kRanks; ++rank) {
        fails_in.push_back(draw(0, 2 * depth()));
        throws_at.push_back(draw(-1, 3));
      }
      // All look at what is outstanding then, if they come so far.
      const int recovers_in = draw(0, 3 * depth());
      const int rank = group->getRank();
      try {
        for (int i = 0; i < fails_in[rank]; ++i) {
          if (i == recovers_in) reducer.recover();
          step(reducer, model.loss(rank));
        }
        if (fails_in[rank] == recovers_in) reducer.recover();
        throw_in_backward(reducer, model, rank, throws_at[rank]);
        ADD_FAILURE() << "nothing was raised";
      } catch (const UserError&) {
      } catch (const c10::DistBackendError&) {
      }
      ASSERT_TRUE(reducer.can_continue()) << "round " << round;
      expect_trains(reducer, model, group, draw(1, depth() + 1));
    }
  });
}

TEST_P(RunAheadTest, OtherCallsThatCommunicateLookAtAllThatIsOutstanding) {
  const std::vector<std::function<void(Reducer&)>> calls = {
      [](Reducer& reducer) { reducer.recover(); },
      [](Reducer& reducer) { reducer.set_comm_hook(nullptr); }};
  for (const auto& call : calls) {
    run_ranks(2, [&](const Group& group) {
      const ToyModel model(kSizes);
      Reducer reducer(model.parameters, group, options());
      expect_trains(reducer, model, group, /*steps=*/3);
      if (group->getRank() == 1) {
        fail_in_backward(reducer, model, 1, /*throws_at=*/1);
      } else {
        const int num_steps = 1 + depth() / 2;
        int made = 0;
        const auto step_or_call = [&] {
          if (made == num_steps) return call(reducer);
          step(reducer, model.loss(0));
        };
        made = steps_until_told_of_4(
            [&] {
              step_or_call();
              ++made;
            },
            depth());
        EXPECT_LE(made, num_steps);
      }
      expect_trains(reducer, model, group, /*steps=*/depth() + 1);
    });
  }
}

// The second one's follows on iterations that are outstanding, unless they have
// been heard of by then.
TEST(RunAheadOfSomeRanksTest, ACollectiveInBetweenEndsTheGroupIfARankFails) {
  for (const int behind : {0, 1}) {
    SCOPED_TRACE("behind " + std::to_string(behind) + " others");
    std::latch all_have_heard(2);
    std::atomic<bool> is_launched = false;
    run_ranks(2, [&](const Group& group) {
      const ToyModel model(kSizes);
      Reducer reducer(model.parameters, group,
                      {.bucket_plan = kOneEach,
                       .defer_status_check = true,
                       .max_unconfirmed_iterations = 2});
      expect_trains(reducer, model, group, /*steps=*/3);
      if (group->getRank() == 1) {
        fail_in_backward(reducer, model, 1, /*throws_at=*/1);
      } else {
        const auto train = [&] {
          std::vector<at::Tensor> own = {at::ones({2})};
          for (int i = 0; i <= 2; ++i) {
            step(reducer, model.loss(0));
            if (i != behind) continue;
            is_launched = true;
            group->allreduce(own);
          }
        };
        EXPECT_THROW(train(), c10::DistBackendError);
      }
      all_have_heard.arrive_and_wait();
      EXPECT_TRUE(is_launched || behind > 0);
      if (is_launched) {
        EXPECT_ANY_THROW(step(reducer, model.loss(1)));
      } else {
        expect_trains(reducer, model, group, /*steps=*/2);
      }
      EXPECT_EQ(reducer.can_continue(), !is_launched);
    });
  }
}

TEST(RunAheadOfSomeRanksTest, IsAnErrorOnAllRanks) {
  run_ranks(2, [](const Group& group) {
    const ToyModel model(kSizes);
    EXPECT_THAT(text_of<c10::ValueError>([&] {
                  Reducer(model.parameters, group,
                          {.max_unconfirmed_iterations = 1 + group->getRank()});
                }),
                HasSubstr("max_unconfirmed_iterations = "));
  });
}

TEST(RunAheadOfSomeRanksTest, IsOneIterationAtLeast) {
  RecordingGroup recording(/*world_size=*/2);
  const ToyModel model(kSizes);
  EXPECT_THAT(text_of<c10::ValueError>([&] {
                Reducer(model.parameters, recording.group(),
                        {.max_unconfirmed_iterations = 0});
              }),
              HasSubstr("max_unconfirmed_iterations must be at least 1"));
}

class WithoutControlChannelTest : public ::testing::TestWithParam<Mode> {
 protected:
  ReducerOptions options() const {
    ReducerOptions options = GetParam().options;
    options.bucket_plan = kOneEach;
    options.control_channel = false;
    return options;
  }
};
INSTANTIATE_TEST_SUITE_P(
    Modes, WithoutControlChannelTest,
    ::testing::Values(Mode{"plain", {}},
                      Mode{"find_unused", {.find_unused_parameters = true}},
                      Mode{"skipping",
                           {.find_unused_parameters = true,
                            .skip_all_reduce_unused_parameters = true}},
                      Mode{"static_graph", {.static_graph = true}},
                      Mode{"rebuilding", {.rebuild_buckets = true}}),
    [](const auto& info) { return std::string(info.param.name); });

TEST_P(WithoutControlChannelTest, Trains) {
  run_ranks(3, [&](const Group& group) {
    const ToyModel model(kSizes);
    Reducer reducer(model.parameters, group, options());
    expect_trains(reducer, model, group, /*steps=*/4);
    reducer.recover();
    reducer.set_comm_hook(nullptr);
    expect_trains(reducer, model, group, /*steps=*/1);
    reducer.shadow_iteration();
    expect_trains(reducer, model, group, /*steps=*/1);
  });
}

TEST_P(WithoutControlChannelTest, SaysNothingToItsPeers) {
  RecordingGroup recording(/*world_size=*/2);
  const ToyModel model(kSizes);
  Reducer reducer(model.parameters, recording.group(), options());
  step(reducer, model.loss(0));
  EXPECT_THAT(recording.statuses(), IsEmpty());
}

TEST_P(WithoutControlChannelTest, AFailureEndsTheGroupOnAllRanks) {
  run_ranks(2, [&](const Group& group) {
    const ToyModel model(kSizes);
    Reducer reducer(model.parameters, group, options());
    expect_trains(reducer, model, group, /*steps=*/2);
    if (group->getRank() == 1) {
      fail_in_backward(reducer, model, 1, /*throws_at=*/1);
    } else {
      EXPECT_THROW(step(reducer, model.loss(0)), c10::DistBackendError);
    }
    EXPECT_FALSE(reducer.can_continue());
  });
}

TEST(WithoutControlChannelTest, MustBeAlikeOnAllRanks) {
  run_ranks(2, [](const Group& group) {
    const ToyModel model(kSizes);
    EXPECT_THAT(text_of<c10::ValueError>([&] {
                  Reducer(model.parameters, group,
                          {.control_channel = group->getRank() == 0});
                }),
                HasSubstr("control_channel = "));
  });
}

TEST(WithoutControlChannelTest, AWorldOfOneGoesOnBehindAFailure) {
  run_ranks(1, [](const Group& group) {
    const ToyModel model(kSizes);
    Reducer reducer(model.parameters, group,
                    {.bucket_plan = kOneEach, .control_channel = false});
    fail_in_backward(reducer, model, 0, /*throws_at=*/1);
    EXPECT_TRUE(reducer.can_continue());
    expect_trains(reducer, model, group, /*steps=*/2);
  });
}

}  // namespace deferred_status_test
}  // namespace brigade
