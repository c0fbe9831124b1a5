// One rank fails, or does something else than its peers: every rank is told the
// same, and training goes on.

#include <c10/util/Exception.h>
#include <torch/torch.h>

#include <chrono>
#include <latch>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "brigade/comm_hooks/function_hook.h"
#include "brigade/reducer/reducer.h"
#include "brigade/tests/reducer/failing.h"
#include "brigade/tests/reducer/step.h"
#include "brigade/tests/reducer/toy_model.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace ranks_apart_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::run_ranks;
using ::testing::StartsWith;
using testing::step;
using testing::text_of;
using testing::ToyModel;
using testing::UserError;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// Long enough that no test passes because a rank gave up waiting.
constexpr std::chrono::minutes kNever{10};

const ToyModel::Sizes kSizes = {{2}, {3}, {5}};
const std::vector<std::vector<size_t>> kOneEach = {{2}, {1}, {0}};

// `throws_at`: the parameter whose gradient is due then; one past the last
// parameter: before any gradient; -1: after all of them.
at::Tensor loss_that_throws(const ToyModel& model, int rank, int throws_at) {
  const auto armed = std::make_shared<bool>(true);
  const auto thrower = [armed](const at::Tensor&) {
    if (std::exchange(*armed, false)) throw UserError("the user's own");
  };
  const int num_parameters = static_cast<int>(model.parameters.size());
  const at::Tensor input = at::ones({1}).requires_grad_();
  const at::Tensor last = input * 0;  // its gradient comes after all others
  const at::Tensor first = model.loss(rank);
  if (throws_at == -1) last.register_hook(thrower);
  if (throws_at == num_parameters) first.register_hook(thrower);
  if (throws_at >= 0 && throws_at < num_parameters) {
    model.parameters[throws_at].register_hook(thrower);
  }
  return last.sum() + first;
}

void expect_trains(Reducer& reducer, const ToyModel& model, const Group& group,
                   int steps = 3) {
  for (int s = 0; s < steps; ++s) {
    testing::expect_trains(reducer, model, group->getRank(), group->getSize(),
                           s);
  }
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
  return {mode("plain", {}),
          mode("copies", {.gradients_as_bucket_views = false}),
          mode("find_unused", {.find_unused_parameters = true}),
          mode("skipping", {.find_unused_parameters = true,
                            .skip_all_reduce_unused_parameters = true}),
          mode("static_graph", {.static_graph = true})};
}

class OneRankThrowsTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(WorldSizes, OneRankThrowsTest,
                         ::testing::Values(2, 3));

// In the first iteration and in a later one, at every place, in every mode.
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
                const at::Tensor loss =
                    loss_that_throws(model, group->getRank(), throws_at);
                reducer.prepare_for_backward(loss);
                EXPECT_THROW(loss.backward(), UserError);
              } else {
                EXPECT_THAT(
                    text_of<c10::DistBackendError>(
                        [&] { step(reducer, model.loss(group->getRank())); }),
                    AllOf(StartsWith("Reducer: rank 1 failed in iteration " +
                                     std::to_string(iteration) + " at launch "),
                          HasSubstr("an exception ended backward")));
              }
              expect_trains(reducer, model, group, /*steps=*/1);
            }
            expect_trains(reducer, model, group);
          },
          kNever);
    }
  }
}

TEST(RanksApartTest, AHookThatThrowsOnOneRankIsQuotedOnTheOthers) {
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
          std::vector<at::Tensor> tensors = {bucket.getBuffer()};
          return group->allreduce(tensors)->getFuture();
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

// Nobody can tell what it would have launched yet.
TEST(RanksApartTest, AHookThatThrowsAfterALaunchEndsTheGroupOnAllRanks) {
  run_ranks(
      2,
      [](const Group& group) {
        const ToyModel model(kSizes);
        const auto hook = make_comm_hook([&](c10d::GradBucket& bucket) {
          std::vector<at::Tensor> tensors = {bucket.getBuffer()};
          const auto future = group->allreduce(tensors)->getFuture();
          if (group->getRank() == 1) throw UserError("no disk");
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
                      AllOf(HasSubstr("rank 1 failed in iteration 1 at launch "
                                      "0: no disk"),
                            HasSubstr("ranks can't be brought in step")));
        }
      },
      kNever);
}

// A deficit is in calls of the hook, however many collectives each launches.
TEST(RanksApartTest, TheDeficitOfAHookOfTwoCollectivesIsLaunchedToo) {
  run_ranks(
      3,
      [](const Group& group) {
        const ToyModel model(kSizes);
        const auto hook = make_comm_hook([&](c10d::GradBucket& bucket) {
          const at::Tensor ones = at::ones({1});
          std::vector<at::Tensor> count = {ones};
          group->allreduce(count)->wait();
          bucket.getBufferRef().div_(ones);
          std::vector<at::Tensor> tensors = {bucket.getBuffer()};
          return group->allreduce(tensors)->getFuture();
        });
        Reducer reducer(model.parameters, group,
                        {.bucket_plan = kOneEach, .comm_hook = hook});
        expect_trains(reducer, model, group, 1);
        // A hook that waits inside would wait for a rank that has failed.
        if (group->getRank() == 2) {
          const at::Tensor loss = loss_that_throws(model, 2, -1);
          reducer.prepare_for_backward(loss);
          EXPECT_THROW(loss.backward(), UserError);
        } else {
          EXPECT_THROW(step(reducer, model.loss(group->getRank())),
                       c10::DistBackendError);
        }
        expect_trains(reducer, model, group);
      },
      kNever);
}

// A forward for a log, or one that is tried again.
TEST(RanksApartTest, AForwardWithoutBackwardIsNoIteration) {
  run_ranks(
      2,
      [](const Group& group) {
        const ToyModel model(kSizes);
        Reducer reducer(model.parameters, group, {.bucket_plan = kOneEach});
        expect_trains(reducer, model, group, 1);
        const at::Tensor loss = model.loss(group->getRank());
        reducer.prepare_for_backward(loss);
        if (group->getRank() == 1) reducer.prepare_for_backward(loss);
        model.zero_grad();
        loss.backward();
        for (size_t i = 0; i < kSizes.size(); ++i) {
          EXPECT_TRUE(at::equal(model.parameters[i].grad(),
                                model.average(i, group->getSize())));
        }
        expect_trains(reducer, model, group);
      },
      kNever);
}

// The loss throws before backward reaches what forward returned; then this rank
// wants to communicate.
TEST(RanksApartTest, RecoverMeetsPeersThatAreInAnIteration) {
  for (const bool prepared : {true, false}) {
    run_ranks(
        2,
        [&](const Group& group) {
          const ToyModel model(kSizes);
          Reducer reducer(model.parameters, group, {.bucket_plan = kOneEach});
          expect_trains(reducer, model, group, 1);
          reducer.recover();  // as before a forward that needs a broadcast
          const at::Tensor loss = model.loss(group->getRank());
          if (group->getRank() == 0 || prepared) {
            reducer.prepare_for_backward(loss);
          }
          EXPECT_THAT(text_of<c10::Error>([&] {
                        group->getRank() == 0 ? loss.backward()
                                              : reducer.recover();
                      }),
                      AllOf(HasSubstr("rank 0 ended iteration 2"),
                            HasSubstr("rank 1 ran no backward in iteration ")));
          reducer.recover();
          std::vector<at::Tensor> tensors = {at::ones({7})};
          group->allreduce(tensors)->wait();
          EXPECT_TRUE(at::equal(tensors[0], at::full({7}, 2.0)));
          expect_trains(reducer, model, group);
        },
        kNever);
  }
}

TEST(RanksApartTest, OneOfTwoBackwardsFailsOnOneRank) {
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
                  if (armed) throw UserError("the user's own");
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

TEST(RanksApartTest, OneRankMissesGradients) {
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
          EXPECT_THAT(text_of<c10::Error>([&] { reducer.recover(); }),
                      HasSubstr("2 of 3 parameters got no gradient"));
        }
        expect_trains(reducer, model, group);
      },
      kNever);
}

TEST(RanksApartTest, EachRankMissesOtherGradients) {
  run_ranks(
      2,
      [](const Group& group) {
        const ToyModel model(kSizes);
        const int rank = group->getRank();
        Reducer reducer(model.parameters, group, {.bucket_plan = kOneEach});
        step(reducer, rank == 0 ? model.loss_in_order({1, 0}, rank)
                                : model.loss_in_order({2, 1}, rank));
        EXPECT_THAT(text_of<c10::Error>([&] { reducer.recover(); }),
                    HasSubstr("1 of 3 parameters got no gradient"));
        expect_trains(reducer, model, group);
      },
      kNever);
}

// Lengths that differ would end the process inside Gloo.
TEST(RanksApartTest, DifferentPlansAreToldBeforeAnythingIsLaunched) {
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
                    HasSubstr("1 buckets, 3 parameters")));
        }
        EXPECT_EQ(reducer.statistics().buckets_launched, 0);
      },
      kNever);
}

// Their gradients would be added up in two orders of elements.
TEST(RanksApartTest, AMemoryFormatOfOneRankOnlyIsTold) {
  run_ranks(
      2,
      [](const Group& group) {
        const ToyModel model({{2, 3, 4, 5}, {3}});
        const int rank = group->getRank();
        Reducer reducer(model.parameters, group, {.bucket_plan = {{0, 1}}});
        step(reducer, model.loss(rank));
        const at::Tensor& moved = model.parameters[0];
        if (rank == 1) {
          moved.set_data(
              moved.detach().contiguous(at::MemoryFormat::ChannelsLast));
        }
        EXPECT_THAT(
            text_of<c10::Error>([&] { step(reducer, model.loss(rank)); }),
            AllOf(HasSubstr("rank 0 ended iteration 2"),
                  HasSubstr("rank 1 began iteration 2"),
                  HasSubstr("of different plans")));
      },
      kNever);
}

// No deficit covers what lies between a rank's launches and its peer's.
TEST(RanksApartTest, ACollectiveInBetweenEndsTheGroupOnAllRanks) {
  run_ranks(
      2,
      [](const Group& group) {
        const ToyModel model(kSizes);
        const int rank = group->getRank();
        Reducer reducer(model.parameters, group, {.bucket_plan = kOneEach});
        if (rank == 1) {
          const at::Tensor loss = loss_that_throws(model, rank, 0);
          reducer.prepare_for_backward(loss);
          EXPECT_THROW(loss.backward(), UserError);
        } else {
          c10::intrusive_ptr<c10d::Work> own;
          model.parameters[0].register_hook([&](const at::Tensor&) {
            std::vector<at::Tensor> tensors = {at::ones({7})};
            own = group->allreduce(tensors);
          });
          EXPECT_THAT(
              text_of<c10::DistBackendError>(
                  [&] { step(reducer, model.loss(rank)); }),
              AllOf(HasSubstr("rank 1 failed in iteration 1"),
                    HasSubstr("ranks can't be brought in step"),
                    HasSubstr("Make a new process group on all ranks")));
        }
        for (const at::Tensor& p : model.parameters) {
          EXPECT_TRUE(at::equal(p, at::ones_like(p)));
          p.mutable_grad().reset();  // its memory is nobody else's
        }
      },
      kNever);
}

TEST(RanksApartTest, ARankThatLeavesIsNamedAtOnce) {
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
                    AllOf(StartsWith("Reducer: bucket "),
                          HasSubstr(" in iteration 3 on rank 0"),
                          HasSubstr("rank 1 has left after iteration 2")));
        // Gradients are defined, and nobody writes to them any more.
        for (const at::Tensor& p : model.parameters) p.mutable_grad().zero_();
      },
      kNever);
}

}  // namespace ranks_apart_test
}  // namespace brigade
