// Reducers whose ranks tell each other nothing.

#include <c10/util/Exception.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "brigade/comm/recording_group.h"
#include "brigade/reducer/reducer.h"
#include "brigade/tests/reducer/failing.h"
#include "brigade/tests/reducer/step.h"
#include "brigade/tests/reducer/toy_model.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace without_control_channel_test {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::run_ranks;
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

struct Mode {
  const char* name;
  ReducerOptions options;
};

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
    reducer.meet_peers("came to a forward");
    reducer.await_statuses();
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

}  // namespace without_control_channel_test
}  // namespace brigade
