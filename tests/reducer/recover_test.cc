// When recover() asks where the peers are, and when it knows.

#include <torch/torch.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "brigade/comm/control/rank_status.h"
#include "brigade/comm/recording_group.h"
#include "brigade/reducer/reducer.h"
#include "brigade/tests/reducer/failing.h"
#include "brigade/tests/reducer/step.h"
#include "brigade/tests/reducer/toy_model.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using testing::step;
using testing::ToyModel;

class RecoverTest : public ::testing::TestWithParam<bool> {
 protected:
  // Whether recover() has asked.
  bool asks() {
    const size_t before = recording_.statuses().size();
    reducer_.recover();
    return recording_.statuses().size() > before;
  }

  void train() { step(reducer_, model_.loss(0)); }

  // At the next exchange of `kind` the peer has failed, after the same launches
  // as this rank, or after `launches`.
  void peer_fails_at(StatusKind kind,
                     std::optional<int32_t> launches = std::nullopt) {
    recording_.answer_statuses_with([=](const RankStatus& own) {
      RankStatus peer = own;
      if (own.kind == kind) {
        peer.kind = StatusKind::kFailed;
        peer.by_group[0].launches = launches.value_or(own.by_group[0].launches);
      }
      return std::vector<RankStatus>{own, peer};
    });
    EXPECT_THROW(train(), c10::DistBackendError);
    recording_.answer_statuses_with({});
  }

  const ToyModel model_{{{2}, {3}}};
  RecordingGroup recording_{2};
  // Ranks that skip buckets meet in the middle of an iteration too.
  Reducer reducer_{model_.parameters,
                   recording_.group(),
                   {.bucket_plan = {{1}, {0}},
                    .find_unused_parameters = GetParam(),
                    .skip_all_reduce_unused_parameters = GetParam()}};
};

TEST_P(RecoverTest, IsFreeWhereRanksMetLast) {
  EXPECT_FALSE(asks());  // in the constructor
  EXPECT_TRUE(asks());   // what was launched since is not known
  train();
  EXPECT_FALSE(asks());
  train();
  reducer_.prepare_for_backward(model_.loss(0));
  EXPECT_TRUE(asks());
  train();
}

TEST_P(RecoverTest, IsFreeIfNothingCouldBePrepared) {
  for (const at::Tensor& parameter : model_.parameters) {
    parameter.set_requires_grad(false);
  }
  reducer_.prepare_for_backward(model_.loss(0));
  EXPECT_FALSE(asks());
}

TEST_P(RecoverTest, LeavesWhatIsPreparedPrepared) {
  const at::Tensor loss = model_.loss(0);
  reducer_.prepare_for_backward(loss);
  EXPECT_TRUE(asks());
  loss.backward();
  EXPECT_EQ(reducer_.statistics().reduced, 1);
}

TEST_P(RecoverTest, IsFreeBehindAFailureThatAllRanksKnow) {
  peer_fails_at(StatusKind::kEnd);
  EXPECT_FALSE(asks());
  train();
}

TEST_P(RecoverTest, IsFreeBehindAFailureAtTheBegin) {
  if (!GetParam()) GTEST_SKIP() << "nobody is asked at the begin";
  peer_fails_at(StatusKind::kBegin);
  EXPECT_FALSE(asks());
  train();
}

TEST_P(RecoverTest, AsksBehindAnEndAtWhichThePeerWasLost) {
  peer_fails_at(StatusKind::kEnd, kAbortedGroup);
  EXPECT_FALSE(reducer_.can_continue());
  EXPECT_TRUE(asks());
}

INSTANTIATE_TEST_SUITE_P(Skipping, RecoverTest, ::testing::Bool());

}  // namespace
}  // namespace brigade
