#include "brigade/tests/support/recording_group.h"

#include <torch/torch.h>

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "brigade/comm/group/group_collectives.h"
#include "brigade/comm/process_group.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace recording_group_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::run_ranks;
using ::testing::SizeIs;

using c10d::OpType;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Tensors = std::vector<at::Tensor>;

// Runs every collective on small integers and returns all outputs.
Tensors results(c10d::ProcessGroup& group, at::ScalarType dtype) {
  const int size = group.getSize();
  const auto values = [&](int64_t numel) {
    return (at::arange(numel, at::kLong) % 3).to(dtype);
  };
  Tensors all;
  for (const auto op : {c10d::ReduceOp::SUM, c10d::ReduceOp::MAX}) {
    Tensors x = {values(7)};
    group.allreduce(x, {.reduceOp = op})->wait();
    all.push_back(x[0]);
  }
  Tensors x = {values(5)};
  group.broadcast(x, {.rootRank = size - 1})->wait();
  all.push_back(x[0]);
  std::vector<Tensors> lists(1);
  for (int i = 0; i < size; ++i) lists[0].push_back(at::zeros(5, dtype));
  group.allgather(lists, x)->wait();
  all.insert(all.end(), lists[0].begin(), lists[0].end());
  at::Tensor shard = values(4);
  at::Tensor whole = at::zeros(4 * size, dtype);
  all_gather_into(group, whole, shard)->wait();
  all.push_back(whole.clone());
  whole.copy_(values(4 * size));
  reduce_scatter_into(group, shard, whole)->wait();
  all.push_back(shard);
  at::Tensor exchanged = at::zeros(4 * size, dtype);
  all_to_all_into(group, exchanged, whole)->wait();
  all.push_back(exchanged);
  if (dtype != at::kFloat) return all;
  Tensors sparse = {
      at::sparse_coo_tensor(at::tensor({1, 4, 1}, at::kLong).view({1, 3}),
                            at::arange(6, at::kFloat).view({3, 2}), {6, 2})};
  group.allreduce(sparse)->wait();
  all.push_back(sparse[0].to_dense());
  return all;
}

TEST(RecordingGroupTest, EqualsGlooWithIdenticalRanks) {
  for (const int size : {1, 2, 3}) {
    run_ranks(size, [&](const Group& gloo) {
      const RecordingGroup recording(size, gloo->getRank());
      for (const auto dtype : {at::kFloat, at::kHalf, at::kInt}) {
        const Tensors expected = results(*gloo, dtype);
        const Tensors found = results(*recording.group(), dtype);
        ASSERT_EQ(found.size(), expected.size());
        for (size_t i = 0; i < found.size(); ++i) {
          EXPECT_TRUE(at::equal(found[i], expected[i])) << dtype << ' ' << i;
        }
      }
    });
  }
}

// Launches an all-reduce of `numel` ones.
struct Launched {
  Tensors tensors;
  c10::intrusive_ptr<c10d::Work> work;
};

Launched launch(const RecordingGroup& recording, int64_t numel = 4) {
  Launched launched = {{at::ones(numel)}, {}};
  launched.work = recording.group()->allreduce(launched.tensors);
  return launched;
}

TEST(RecordingGroupTest, LogsEveryCollectiveInOrder) {
  RecordingGroup recording(4, 1);
  launch(recording, 10);
  Tensors x = {at::ones({2, 3}, at::kHalf)};
  recording.group()->broadcast(x, {.rootRank = 3})->wait();
  const auto log = recording.log();
  ASSERT_THAT(log, SizeIs(2));
  EXPECT_EQ(log[0].type, OpType::ALLREDUCE);
  EXPECT_EQ(log[0].bytes, 40);
  EXPECT_EQ(log[1].type, OpType::BROADCAST);
  EXPECT_EQ(log[1].numel, 6);
  EXPECT_EQ(log[1].dtype, at::kHalf);
}

TEST(RecordingGroupTest, CompletesHeldCollectivesInAnyOrder) {
  RecordingGroup recording(2);
  recording.hold();
  const Launched a = launch(recording);
  const Launched b = launch(recording);
  EXPECT_THAT(recording.held(), ElementsAre(0, 1));
  b.work->getFuture()->addCallback(  // launches another collective
      [&](c10::ivalue::Future&) { launch(recording); });
  recording.complete(1);
  EXPECT_TRUE(b.work->getFuture()->completed());
  EXPECT_FALSE(a.work->getFuture()->completed());
  EXPECT_TRUE(at::equal(a.tensors[0], at::ones(4))) << "written too early";
  EXPECT_TRUE(at::equal(b.tensors[0], at::full({4}, 2.0)));
  EXPECT_THAT(recording.held(), ElementsAre(0, 2));
  recording.release();
  EXPECT_TRUE(at::equal(a.tensors[0], at::full({4}, 2.0)));
  EXPECT_THAT(recording.held(), IsEmpty());
}

TEST(RecordingGroupTest, FailsTheChosenCollective) {
  RecordingGroup recording(2);
  const auto error = std::make_exception_ptr(std::domain_error("no route"));
  recording.fail_at_launch(0, error);
  recording.fail_at_completion(1, error);
  EXPECT_THROW(launch(recording), std::domain_error);
  EXPECT_THROW(launch(recording).work->wait(), std::domain_error);
  launch(recording).work->wait();
  EXPECT_THAT(recording.log(), SizeIs(3));
}

TEST(RecordingGroupTest, FailsHeldCollectivesAtItsEnd) {
  Launched held;
  {
    RecordingGroup recording(2);
    recording.hold();
    held = launch(recording);
  }
  EXPECT_THROW(held.work->wait(), c10::DistBackendError);
}

TEST(RecordingGroupTest, MakesSubgroups) {
  const RecordingGroup recording(/*world_size=*/6, /*rank=*/4);
  const GroupScope subgroup(make_subgroup(recording.group(), {3, 4, 5}));
  EXPECT_EQ(subgroup.group()->getRank(), 1);
  Tensors x = {at::ones(2)};
  subgroup.group()->allreduce(x)->wait();
  EXPECT_TRUE(at::equal(x[0], at::full(2, 3.0)));
  EXPECT_THAT(recording.log(), IsEmpty());
}

}  // namespace recording_group_test
}  // namespace brigade
