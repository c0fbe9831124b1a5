// One rank fails, or differs from its peers: all ranks throw, and training goes
// on.

#include <c10/util/Exception.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "brigade/comm_hooks/comm_hooks.h"
#include "brigade/reducer/reducer.h"
#include "brigade/tests/reducer/failing.h"
#include "brigade/tests/reducer/toy_model.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace rank_failure_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::run_ranks;
using ::testing::StartsWith;
using testing::step;
using testing::text_of;
using testing::throw_in_backward;
using testing::ToyModel;
using testing::UserError;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

std::shared_ptr<c10d::CommHookInterface> summing_hook(const Group& group) {
  return make_comm_hook([group](c10d::GradBucket& bucket) {
    bucket.getBufferRef().div_(group->getSize());
    return testing::all_reduced(group, bucket);
  });
}

// No test passes because of a timeout.
constexpr std::chrono::minutes kNever{10};

const ToyModel::Sizes kSizes = {{2}, {3}, {5}};
const std::vector<std::vector<size_t>> kOneEach = {{2}, {1}, {0}};

void expect_trains(Reducer& reducer, const ToyModel& model, const Group& group,
                   int steps = 3) {
  for (int s = 0; s < steps; ++s) {
    testing::expect_trains(reducer, model, group->getRank(), group->getSize(),
                           s);
  }
}

// Expects every call to throw with `reason`.
void expect_closed(Reducer& reducer, const ToyModel& model,
                   const std::string& reason) {
  EXPECT_FALSE(reducer.can_continue());
  EXPECT_THAT(text_of<c10::DistBackendError>(
                  [&] { reducer.prepare_for_backward(model.loss(0)); }),
              AllOf(HasSubstr("found one that was closed"), HasSubstr(reason),
                    HasSubstr("Make a new process group on all ranks")));
}

struct Mode {
  const char* name;
  ReducerOptions options;
};

Mode mode(const char* name, ReducerOptions options) {
  options.bucket_plan = kOneEach;
  options.parameter_names = {"p0", "p1", "p2"};
  return {.name = name, .options = std::move(options)};
}

std::vector<Mode> modes() {
  return {mode("plain", {}), mode("copies", {.gradient_as_bucket_view = false}),
          mode("find_unused", {.find_unused_parameters = true}),
          mode("skipping", {.find_unused_parameters = true,
                            .skip_all_reduce_unused_parameters = true}),
          mode("static_graph", {.static_graph = true})};
}

class OneRankThrowsTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(WorldSizes, OneRankThrowsTest,
                         ::testing::Values(2, 3));

// In the first iteration and in a later one, before each gradient, in each
// mode.
TEST_P(OneRankThrowsTest, AllRaiseAndTrainOn) {
  for (const Mode& mode : modes()) {
    for (int throws_at = -1; throws_at <= 3; ++throws_at) {
      SCOPED_TRACE(std::string(mode.name) + ", throws at " +
                   std::to_string(throws_at));
      run_ranks(
          GetParam(),
          [&](const Group& group) {
            const bool fails = group->getRank() == 1;
            const ToyModel model(kSizes);
            Reducer reducer(model.parameters, group, mode.options);
            for (int iteration : {1, 3}) {
              if (fails) {
                EXPECT_THROW(throw_in_backward(reducer, model, group->getRank(),
                                               throws_at),
                             UserError);
              } else {
                EXPECT_THAT(
                    text_of<c10::DistBackendError>(
                        [&] { step(reducer, model.loss(group->getRank())); }),
                    AllOf(StartsWith("Reducer: rank 1 failed in iteration " +
                                     std::to_string(iteration) + " at launch "),
                          HasSubstr("its backward raised an exception")));
              }
              expect_trains(reducer, model, group, /*steps=*/1);
            }
            expect_trains(reducer, model, group);
          },
          kNever);
    }
  }
}

TEST(RankFailureTest, AHookThatThrowsOnOneRankIsQuotedOnTheOthers) {
  run_ranks(
      3,
      [](const Group& group) {
        const ToyModel model(kSizes);
        bool broken = true;
        const auto hook = make_comm_hook([&](c10d::GradBucket& bucket) {
          if (broken && group->getRank() == 2 && bucket.getIndex() == 1) {
            broken = false;
            throw UserError("no disk");
          }
          bucket.getBufferRef().div_(3);
          return testing::all_reduced(group, bucket);
        });
        Reducer reducer(model.parameters, group,
                        {.bucket_plan = kOneEach, .comm_hook = hook});
        if (group->getRank() == 2) {
          EXPECT_THAT(
              text_of<c10::Error>([&] { step(reducer, model.loss(2)); }),
              HasSubstr("no disk"));
        } else {
          EXPECT_EQ(text_of<c10::DistBackendError>(
                        [&] { step(reducer, model.loss(group->getRank())); }),
                    "Reducer: rank 2 failed in iteration 1 at launch 1: no "
                    "disk.");
        }
        expect_trains(reducer, model, group);
      },
      kNever);
}

// A hook that throws is called again on zeros for the rest of the sequence.
// That is not possible if it throws again, or if it threw after a launch.
TEST(RankFailureTest, AHookThatCannotBeRunOnZerosEndsTheGroupOnAllRanks) {
  for (const bool launches_first : {true, false}) {
    run_ranks(
        2,
        [&](const Group& group) {
          const ToyModel model(kSizes);
          const int launch = launches_first ? 0 : 1;
          const auto hook = make_comm_hook([&](c10d::GradBucket& bucket) {
            const bool fails = group->getRank() == 1 &&
                               bucket.getIndex() >= static_cast<size_t>(launch);
            if (fails && !launches_first) throw UserError("no disk");
            std::vector<at::Tensor> tensors = {bucket.getBuffer()};
            const auto future = group->allreduce(tensors)->getFuture();
            if (fails) throw UserError("no disk");
            return future;
          });
          Reducer reducer(model.parameters, group,
                          {.bucket_plan = kOneEach, .comm_hook = hook});
          if (group->getRank() == 1) {
            EXPECT_THAT(
                text_of<c10::Error>([&] { step(reducer, model.loss(1)); }),
                HasSubstr("no disk"));
          } else {
            EXPECT_THAT(text_of<c10::DistBackendError>(
                            [&] { step(reducer, model.loss(0)); }),
                        AllOf(HasSubstr("rank 1 failed in iteration 1 at "
                                        "launch " +
                                        std::to_string(launch) + ": no disk"),
                              HasSubstr("Make a new process group on all "
                                        "ranks")));
          }
          expect_closed(reducer, model, "rank 1 failed in iteration 1");
        },
        kNever);
  }
}

// Peers wait inside the hook for a collective that the failed rank never
// launches, so they do not send their statuses.
TEST(RankFailureTest, AHookThatWaitsForACollectiveInsideEndsTheGroup) {
  run_ranks(
      3,
      [&](const Group& group) {
        const ToyModel model(kSizes);
        const auto hook = make_comm_hook([&](c10d::GradBucket& bucket) {
          const at::Tensor ones = at::ones({1});
          std::vector<at::Tensor> count = {ones};
          group->allreduce(count)->wait();
          bucket.getBufferRef().div_(ones);
          return testing::all_reduced(group, bucket);
        });
        Reducer reducer(model.parameters, group,
                        {.bucket_plan = kOneEach, .comm_hook = hook});
        expect_trains(reducer, model, group, 1);
        if (group->getRank() == 2) {
          EXPECT_THROW(throw_in_backward(reducer, model, 2, 1), UserError);
        } else {
          EXPECT_ANY_THROW(step(reducer, model.loss(group->getRank())));
        }
        EXPECT_FALSE(reducer.can_continue());
        EXPECT_ANY_THROW(step(reducer, model.loss(group->getRank())));
      },
      kNever);
}

// A rank calls barrier() while its peers are in an iteration that it has not
// begun. It launches zeros for them.
TEST(RankFailureTest, ABarrierDuringThePeersIterationLaunchesZeros) {
  for (const bool prepared : {true, false}) {
    run_ranks(
        3,
        [&](const Group& group) {
          const ToyModel model(kSizes);
          Reducer reducer(model.parameters, group, {.bucket_plan = kOneEach});
          expect_trains(reducer, model, group, 1);
          const bool fails = group->getRank() == 1;
          for (const int iteration : {2, 4}) {
            reducer.barrier("came to a forward");
            const at::Tensor loss = model.loss(group->getRank());
            if (!fails || prepared) reducer.prepare_for_backward(loss);
            EXPECT_THAT(
                text_of<c10::Error>([&] {
                  fails ? reducer.barrier("came to a forward")
                        : loss.backward();
                }),
                AllOf(HasSubstr("ranks 0, 2 ended iteration " +
                                std::to_string(iteration)),
                      HasSubstr("rank 1 came to a forward after iteration " +
                                std::to_string(iteration - 1))));
            EXPECT_TRUE(reducer.can_continue());
            EXPECT_EQ(reducer.statistics().begun, iteration);
            // No collective is left on the group.
            std::vector<at::Tensor> tensors = {at::ones({7})};
            group->allreduce(tensors)->wait();
            EXPECT_TRUE(at::equal(tensors[0], at::full({7}, 3.0)));
            reducer.barrier("came to a forward");
            expect_trains(reducer, model, group, 1);
          }
        },
        kNever);
  }
}

TEST(RankFailureTest, ABarrierWithDifferentActionsFailsOnAllRanks) {
  run_ranks(
      2,
      [](const Group& group) {
        const ToyModel model(kSizes);
        Reducer reducer(model.parameters, group, {.bucket_plan = kOneEach});
        const std::string action = group->getRank() == 0 ? "came" : "saw";
        EXPECT_THAT(text_of<c10::Error>([&] { reducer.barrier(action); }),
                    HasSubstr("rank 0 came, rank 1 saw"));
        expect_trains(reducer, model, group);
      },
      kNever);
}

TEST(RankFailureTest, ABarrierKeepsThePreparedIteration) {
  run_ranks(
      2,
      [](const Group& group) {
        const ToyModel model(kSizes);
        Reducer reducer(model.parameters, group, {.bucket_plan = kOneEach});
        const at::Tensor loss = model.loss(group->getRank());
        reducer.prepare_for_backward(loss);
        reducer.barrier("came to the end of a forward");
        loss.backward();
        EXPECT_EQ(reducer.statistics().reduced, 1);
      },
      kNever);
}

// The future of a user's hook may fail on one rank after all launches.
TEST(RankFailureTest, AFutureThatFailsOnOneRankIsAnErrorOnAll) {
  run_ranks(
      3,
      [](const Group& group) {
        const ToyModel model(kSizes);
        bool fails = false;
        const auto hook = make_comm_hook([&](c10d::GradBucket& bucket) {
          std::vector<at::Tensor> tensors = {bucket.getBuffer().div_(3)};
          return group->allreduce(tensors)->getFuture()->then(
              [&fails](c10::ivalue::Future& reduced) {
                if (fails) throw UserError("no disk");
                return reduced.value();
              },
              c10::AnyType::get());
        });
        Reducer reducer(model.parameters, group,
                        {.bucket_plan = kOneEach, .comm_hook = hook});
        expect_trains(reducer, model, group, /*steps=*/2);
        fails = group->getRank() == 1;
        const auto train = [&] { step(reducer, model.loss(group->getRank())); };
        EXPECT_THAT(fails ? text_of<c10::Error>(train)
                          : text_of<c10::DistBackendError>(train),
                    HasSubstr("no disk"));
        fails = false;
        expect_trains(reducer, model, group, /*steps=*/2);
      },
      kNever);
}

// Forwards and backwards fail at random places, on several ranks, before and
// after a broadcast.
TEST(RankFailureTest, RanksThatFailAnywhereTrainOn) {
  struct ForwardError : UserError {
    using UserError::UserError;
  };
  for (const Mode& mode : modes()) {
    for (const bool broadcasts : {false, true}) {
      SCOPED_TRACE(std::string(mode.name) + ", " + std::to_string(broadcasts));
      constexpr int kRanks = 3;
      run_ranks(
          kRanks,
          [&](const Group& group) {
            const int rank = group->getRank();
            const ToyModel model(kSizes);
            Reducer reducer(model.parameters, group, mode.options);
            std::mt19937 random(11);  // the same on all ranks
            const auto draw = [&](int from, int to) {
              return std::uniform_int_distribution<int>(from, to)(random);
            };
            const auto send_buffers = [&] {
              if (!broadcasts) return;
              reducer.broadcast_before_forward({at::ones({20})}, /*source=*/1);
            };
            for (int round = 0; round < 20; ++round) {
              std::vector<int> failing;  // by rank; -2: does not fail
              for (int r = 0; r < kRanks; ++r) {
                failing.push_back(draw(0, 1) == 0 ? -2 : draw(-1, 4));
              }
              const auto fails_in_forward = [&](int r) {
                return broadcasts && failing[r] == 4;
              };
              const int throws_at = std::min(failing[rank], 3);
              try {
                send_buffers();
                if (fails_in_forward(rank)) throw ForwardError("no memory");
                if (throws_at >= -1) {
                  throw_in_backward(reducer, model, rank, throws_at);
                } else {
                  step(reducer, model.loss(rank));
                }
                for (const int other : failing) EXPECT_EQ(other, -2);
              } catch (const ForwardError&) {
                const bool all_do = fails_in_forward(0) &&
                                    fails_in_forward(1) && fails_in_forward(2);
                if (!all_do) {
                  EXPECT_THROW(send_buffers(), c10::Error);
                }
              } catch (const std::exception&) {
              }
              ASSERT_TRUE(reducer.can_continue()) << "round " << round;
              send_buffers();
              expect_trains(reducer, model, group, 1);
            }
          },
          kNever);
    }
  }
}

TEST(RankFailureTest, OneOfTwoBackwardsFailsOnOneRank) {
  for (const int failing_backward : {0, 1}) {
    run_ranks(
        2,
        [&](const Group& group) {
          const ToyModel model(kSizes);
          const int rank = group->getRank();
          Reducer reducer(model.parameters, group, {.bucket_plan = kOneEach});
          const std::vector<at::Tensor> losses = {
              model.loss_in_order({2, 1}, rank),
              model.loss_in_order({0}, rank)};
          reducer.prepare_for_backward(losses);
          const size_t due = failing_backward == 0 ? 1 : 0;
          if (rank == 1) {
            bool armed = true;
            const unsigned hook =
                model.parameters[due].register_hook([&](const at::Tensor&) {
                  if (armed) throw UserError("user error");
                });
            if (failing_backward == 1) losses[0].backward();
            EXPECT_THROW(losses[failing_backward].backward(), UserError);
            armed = false;
            model.parameters[due].remove_hook(hook);
          } else {
            losses[0].backward();
            EXPECT_THAT(
                text_of<c10::DistBackendError>([&] { losses[1].backward(); }),
                HasSubstr("rank 1 failed in iteration 1 at launch"));
          }
          expect_trains(reducer, model, group);
        },
        kNever);
  }
}

TEST(RankFailureTest, OneRankMissesGradients) {
  run_ranks(
      2,
      [](const Group& group) {
        const ToyModel model(kSizes);
        const int rank = group->getRank();
        Reducer reducer(model.parameters, group, {.bucket_plan = kOneEach});
        if (rank == 0) {
          EXPECT_THAT(text_of<c10::DistBackendError>(
                          [&] { step(reducer, model.loss(rank)); }),
                      AllOf(HasSubstr("rank 1 failed in iteration 1 at launch "
                                      "1: "),
                            HasSubstr("2 of 3 parameters got no gradient")));
        } else {
          step(reducer, model.loss_in_order({2}, rank));
          EXPECT_THAT(text_of<c10::Error>([&] { reducer.end_iteration(); }),
                      HasSubstr("2 of 3 parameters got no gradient"));
        }
        expect_trains(reducer, model, group);
      },
      kNever);
}

// Gloo would end the process if the lengths differed.
TEST(RankFailureTest, DifferentPlansAreAnErrorBeforeTheFirstLaunch) {
  run_ranks(
      2,
      [](const Group& group) {
        const ToyModel model(kSizes);
        const int rank = group->getRank();
        Reducer reducer(
            model.parameters, group,
            {.bucket_plan = rank == 0
                                ? kOneEach
                                : std::vector<std::vector<size_t>>{{0, 1, 2}},
             .verify_across_ranks = false});
        for (int s = 0; s < 2; ++s) {
          EXPECT_THAT(
              text_of<c10::Error>([&] { step(reducer, model.loss(rank)); }),
              AllOf(HasSubstr("expected the same plan and options on every "
                              "rank"),
                    HasSubstr("3 buckets, 3 parameters"),
                    HasSubstr("1 bucket, 3 parameters")));
        }
        EXPECT_EQ(reducer.statistics().buckets_launched, 0);
      },
      kNever);
}

// All ranks run a collective in each backward, as in batch norm over ranks.
// Zeros of the failed rank would meet it.
TEST(RankFailureTest, ACollectiveInBackwardEndsTheGroupOnAllRanksIfOneFails) {
  struct Case {
    bool has_users_hook;
    int iteration;
    int throws_at;
  };
  for (const auto& [has_users_hook, iteration, throws_at] :
       {Case{false, 3, 2}, Case{true, 1, 0}}) {
    SCOPED_TRACE("iteration " + std::to_string(iteration) + ", throws at " +
                 std::to_string(throws_at));
    run_ranks(
        2,
        [&](const Group& group) {
          const ToyModel model(kSizes);
          const int rank = group->getRank();
          ReducerOptions options = {.bucket_plan = kOneEach};
          if (has_users_hook) options.comm_hook = summing_hook(group);
          Reducer reducer(model.parameters, group, options);
          model.parameters[1].register_hook([&](const at::Tensor&) {
            std::vector<at::Tensor> tensors = {at::ones({7})};
            group->allreduce(tensors)->wait();
          });
          expect_trains(reducer, model, group, iteration - 1);
          if (rank == 1) {
            EXPECT_THROW(throw_in_backward(reducer, model, rank, throws_at),
                         UserError);
          } else {
            EXPECT_ANY_THROW(step(reducer, model.loss(rank)));
          }
          expect_closed(reducer, model, "");
          for (const at::Tensor& p : model.parameters) {
            EXPECT_TRUE(at::equal(p, at::ones_like(p)));
            p.mutable_grad().reset();  // frees its memory
          }
        },
        kNever);
  }
}

// Not all ranks have launched the program's collective when one fails.
TEST(RankFailureTest, ACollectiveOfOneRankEndsTheGroupOnAllRanksIfOneFails) {
  for (const bool has_users_hook : {false, true}) {
    SCOPED_TRACE(has_users_hook);
    run_ranks(
        2,
        [&](const Group& group) {
          const ToyModel model(kSizes);
          const int rank = group->getRank();
          ReducerOptions options = {.bucket_plan = kOneEach};
          if (has_users_hook) options.comm_hook = summing_hook(group);
          Reducer reducer(model.parameters, group, options);
          if (rank == 1) {
            EXPECT_THROW(throw_in_backward(reducer, model, rank, 0), UserError);
          } else {
            c10::intrusive_ptr<c10d::Work> own;
            model.parameters[0].register_hook([&](const at::Tensor&) {
              std::vector<at::Tensor> tensors = {at::ones({2})};
              own = group->allreduce(tensors);
            });
            EXPECT_THAT(text_of<c10::DistBackendError>(
                            [&] { step(reducer, model.loss(rank)); }),
                        HasSubstr("rank 1 failed in iteration 1"));
          }
          expect_closed(reducer, model, "");
          for (const at::Tensor& p : model.parameters) {
            p.mutable_grad().reset();
          }
        },
        kNever);
  }
}

TEST(RankFailureTest, ARankThatLeavesIsNamedAtOnce) {
  run_ranks(
      2,
      [](const Group& group) {
        const ToyModel model(kSizes);
        std::optional<Reducer> reducer(std::in_place, model.parameters, group,
                                       ReducerOptions{.bucket_plan = kOneEach});
        expect_trains(*reducer, model, group, 2);
        if (group->getRank() == 1) {
          reducer.reset();
          return;
        }
        EXPECT_THAT(text_of<c10::DistBackendError>(
                        [&] { step(*reducer, model.loss(0)); }),
                    AllOf(StartsWith("Reducer: rank 1 destroyed its model "
                                     "after iteration 2.\n"),
                          HasSubstr("\nPending: bucket "),
                          HasSubstr(" in iteration 3 on rank 0")));
        // No view of a bucket is left, which collectives may still write to.
        for (const at::Tensor& p : model.parameters) {
          EXPECT_FALSE(p.grad().defined());
        }
      },
      kNever);
}

}  // namespace rank_failure_test
}  // namespace brigade
