#include "brigade/comm/recording_group.h"

#include <torch/torch.h>

#include <functional>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "brigade/comm/subgroup.h"
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
using c10d::ReduceOp;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Tensors = std::vector<at::Tensor>;

// Small whole numbers, exact in every type and after every reduction.
at::Tensor values(int64_t numel, at::ScalarType dtype) {
  return (at::arange(numel, at::kLong) % 3).to(dtype);
}

// `count` tensors that a collective writes.
Tensors zeros(int count, int64_t numel, at::ScalarType dtype) {
  Tensors all;
  for (int i = 0; i < count; ++i) all.push_back(at::zeros(numel, dtype));
  return all;
}

// One per rank, which differ.
Tensors values_of_ranks(int world_size, int64_t numel, at::ScalarType dtype) {
  Tensors all;
  for (int i = 0; i < world_size; ++i) all.push_back(values(numel, dtype) + i);
  return all;
}

struct Operation {
  const char* name;
  // Runs it on identical inputs; returns all that it has written.
  std::function<Tensors(c10d::ProcessGroup&, at::ScalarType)> run;
  bool integers_only = false;
  bool root_only = false;
};

Operation all_reduce(const char* name, ReduceOp::RedOpType op,
                     bool integers_only = false) {
  return {name,
          [op](auto& group, auto dtype) {
            Tensors x = {values(7, dtype)};
            group.allreduce(x, {.reduceOp = op})->wait();
            return x;
          },
          integers_only};
}

const std::vector<Operation>& operations() {
  static const auto* all = new std::vector<Operation>{
      all_reduce("sum", ReduceOp::SUM),
      all_reduce("product", ReduceOp::PRODUCT),
      all_reduce("min", ReduceOp::MIN),
      all_reduce("max", ReduceOp::MAX),
      all_reduce("band", ReduceOp::BAND, true),
      all_reduce("bor", ReduceOp::BOR, true),
      all_reduce("bxor", ReduceOp::BXOR, true),
      {"allreduce_coalesced",
       [](auto& group, auto dtype) {
         Tensors x = {values(3, dtype), values(5, dtype)};
         group.allreduce_coalesced(x, {})->wait();
         return x;
       }},
      {"reduce",
       [](auto& group, auto dtype) {
         Tensors x = {values(5, dtype)};
         const int root = group.getSize() - 1;
         group.reduce(x, {.rootRank = root})->wait();
         // Elsewhere the tensor's content is not defined.
         return group.getRank() == root ? x : Tensors{};
       }},
      {"broadcast",
       [](auto& group, auto dtype) {
         Tensors x = {values(5, dtype)};
         group.broadcast(x, {.rootRank = group.getSize() - 1})->wait();
         return x;
       }},
      {"allgather",
       [](auto& group, auto dtype) {
         Tensors x = {values(5, dtype)};
         std::vector<Tensors> y = {zeros(group.getSize(), 5, dtype)};
         group.allgather(y, x)->wait();
         return y[0];
       }},
      {"allgather_base",
       [](auto& group, auto dtype) {
         at::Tensor x = values(5, dtype);
         at::Tensor y = at::zeros(5 * group.getSize(), dtype);
         group._allgather_base(y, x)->wait();
         return Tensors{y};
       }},
      {"allgather_into_tensor_coalesced",
       [](auto& group, auto dtype) {
         Tensors x = {values(5, dtype), values(2, dtype)};
         Tensors y = {at::zeros(5 * group.getSize(), dtype),
                      at::zeros(2 * group.getSize(), dtype)};
         group.allgather_into_tensor_coalesced(y, x)->wait();
         return y;
       }},
      {"gather",
       [](auto& group, auto dtype) {
         Tensors x = {values(5, dtype)};
         std::vector<Tensors> y;
         if (group.getRank() == 0) y = {zeros(group.getSize(), 5, dtype)};
         group.gather(y, x)->wait();
         return y.empty() ? Tensors{} : y[0];
       }},
      {"scatter",
       [](auto& group, auto dtype) {
         std::vector<Tensors> x;
         if (group.getRank() == 0) {
           x = {values_of_ranks(group.getSize(), 5, dtype)};
         }
         Tensors y = zeros(1, 5, dtype);
         group.scatter(y, x)->wait();
         return y;
       },
       false, /*root_only=*/true},
      {"reduce_scatter",
       [](auto& group, auto dtype) {
         std::vector<Tensors> x = {values_of_ranks(group.getSize(), 5, dtype)};
         Tensors y = zeros(1, 5, dtype);
         group.reduce_scatter(y, x)->wait();
         return y;
       }},
      {"reduce_scatter_base",
       [](auto& group, auto dtype) {
         at::Tensor x = values(5 * group.getSize(), dtype);
         at::Tensor y = at::zeros(5, dtype);
         group._reduce_scatter_base(y, x)->wait();
         return Tensors{y};
       }},
      {"reduce_scatter_tensor_coalesced",
       [](auto& group, auto dtype) {
         Tensors x = {values(5 * group.getSize(), dtype),
                      values(2 * group.getSize(), dtype)};
         Tensors y = {at::zeros(5, dtype), at::zeros(2, dtype)};
         group.reduce_scatter_tensor_coalesced(y, x)->wait();
         return y;
       }},
      {"alltoall_base",
       [](auto& group, auto dtype) {
         at::Tensor x = values(4 * group.getSize(), dtype);
         at::Tensor y = at::zeros(4 * group.getSize(), dtype);
         std::vector<int64_t> none;
         group.alltoall_base(y, x, none, none)->wait();
         return Tensors{y};
       }},
      {"alltoall_base_with_splits",
       [](auto& group, auto dtype) {
         std::vector<int64_t> from(group.getSize());
         std::iota(from.begin(), from.end(), 1);
         std::vector<int64_t> to(group.getSize(), group.getRank() + 1);
         at::Tensor x =
             values(std::accumulate(from.begin(), from.end(), 0), dtype);
         at::Tensor y =
             at::zeros(group.getSize() * (group.getRank() + 1), dtype);
         group.alltoall_base(y, x, to, from)->wait();
         return Tensors{y};
       }},
      {"barrier",
       [](auto& group, auto) {
         // ProcessGroup::barrier() shares a tensor between all its callers,
         // which here are threads.
         group.getBackend(at::kCPU)->barrier()->wait();
         return Tensors{};
       }},
  };
  return *all;
}

class SameAsGlooTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(WorldSizes, SameAsGlooTest,
                         ::testing::Values(1, 2, 3, 4));

TEST_P(SameAsGlooTest, ForIdenticalRanksInEveryOperationAndType) {
  run_ranks(GetParam(), [&](Group gloo) {
    RecordingGroup recording(gloo->getSize(), gloo->getRank());
    for (const Operation& operation : operations()) {
      for (at::ScalarType dtype :
           {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kInt,
            at::kLong, at::kByte, at::kChar}) {
        if (operation.integers_only && at::isFloatingType(dtype)) continue;
        const Tensors real = operation.run(*gloo, dtype);
        if (operation.root_only && gloo->getRank() != 0) continue;
        const Tensors ours = operation.run(*recording.group(), dtype);
        ASSERT_EQ(ours.size(), real.size()) << operation.name;
        for (size_t i = 0; i < real.size(); ++i) {
          EXPECT_TRUE(at::equal(ours[i], real[i]))
              << operation.name << " " << dtype << " rank " << gloo->getRank()
              << "\nreal " << real[i] << "\nours " << ours[i];
        }
      }
    }
  });
}

TEST_P(SameAsGlooTest, ForSparseTensors) {
  run_ranks(GetParam(), [&](Group gloo) {
    RecordingGroup recording(gloo->getSize(), gloo->getRank());
    const auto sum = [](c10d::ProcessGroup& group) {
      const at::Tensor indices = at::tensor({1, 4, 1}, at::kLong).view({1, 3});
      Tensors x = {at::sparse_coo_tensor(
          indices, at::arange(6, at::kFloat).view({3, 2}), {6, 2})};
      group.allreduce(x)->wait();
      return x[0].to_dense();
    };
    EXPECT_TRUE(at::equal(sum(*recording.group()), sum(*gloo)));
  });
}

TEST(RecordingGroupTest, AveragesToTheSame) {
  RecordingGroup recording(3);
  Tensors x = {at::arange(4, at::kFloat)};
  recording.group()->allreduce(x, {.reduceOp = ReduceOp::AVG})->wait();
  EXPECT_TRUE(at::equal(x[0], at::arange(4, at::kFloat)));
}

// As real backends do; else a parameter could not be broadcast.
TEST(RecordingGroupTest, WritesBelowAutograd) {
  RecordingGroup recording(2);
  const at::Tensor parameter = at::ones(3).requires_grad_();
  const auto version = parameter._version();
  Tensors x = {parameter};
  recording.group()->allreduce(x)->wait();
  EXPECT_TRUE(at::equal(parameter, at::full({3}, 2.0)));
  EXPECT_EQ(parameter._version(), version);
  EXPECT_TRUE(parameter.is_leaf());
}

TEST(RecordingGroupTest, RefusesWhatIdenticalRanksDoNotDetermine) {
  RecordingGroup recording(2, 1);
  Tensors x = {at::ones(1)};
  std::vector<Tensors> none;
  EXPECT_THROW(recording.group()->send(x, 0, 0), c10::Error);
  EXPECT_THROW(recording.group()->recv(x, 0, 0), c10::Error);
  EXPECT_THROW(recording.group()->scatter(x, none, {.rootRank = 0}),
               c10::NotImplementedError);
}

TEST(RecordingGroupTest, RefusesSizesThatDoNotFit) {
  RecordingGroup recording(2);
  at::Tensor x = at::ones(3);
  at::Tensor y = at::ones(5);
  EXPECT_THROW(recording.group()->_allgather_base(y, x), c10::ValueError);
  EXPECT_THROW(recording.group()->_reduce_scatter_base(x, y), c10::ValueError);
  Tensors z = {x};
  EXPECT_THROW(recording.group()->broadcast(z, {.rootRank = 2}),
               c10::ValueError);
  EXPECT_THROW(RecordingGroup(2, 2), c10::ValueError);
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
  recording.group()->barrier()->wait();
  const auto log = recording.log();
  ASSERT_THAT(log, SizeIs(3));
  EXPECT_EQ(log[0].type, OpType::ALLREDUCE);
  EXPECT_EQ(log[0].numel, 10);
  EXPECT_EQ(log[0].bytes, 40);
  EXPECT_EQ(log[0].dtype, at::kFloat);
  EXPECT_EQ(log[1].type, OpType::BROADCAST);
  EXPECT_EQ(log[1].numel, 6);
  EXPECT_EQ(log[1].bytes, 12);
  EXPECT_EQ(log[1].dtype, at::kHalf);
  EXPECT_EQ(log[2].type, OpType::BARRIER);
}

TEST(RecordingGroupTest, FuturesCarryTensorsAsCommHooksExpect) {
  RecordingGroup recording(2);
  Launched launched = launch(recording);
  auto doubled = launched.work->getFuture()->then(
      [](c10::ivalue::Future& future) {
        return c10::IValue(future.value().toTensorVector()[0] * 2);
      },
      c10::TensorType::get());
  EXPECT_TRUE(at::equal(doubled->value().toTensor(), at::full({4}, 4.0)));
  EXPECT_TRUE(launched.work->isCompleted());
  EXPECT_TRUE(launched.work->isSuccess());
  EXPECT_TRUE(launched.work->result()[0].is_same(launched.tensors[0]));
}

TEST(RecordingGroupTest, HeldCollectivesCompleteInTheTestsOrder) {
  RecordingGroup recording(2);
  recording.hold();
  Launched a = launch(recording);
  Launched b = launch(recording);
  EXPECT_THAT(recording.held(), ElementsAre(0, 1));
  EXPECT_FALSE(a.work->isCompleted());
  recording.complete(1);
  EXPECT_TRUE(b.work->isCompleted());
  EXPECT_TRUE(b.work->getFuture()->completed());
  EXPECT_FALSE(a.work->isCompleted());
  EXPECT_TRUE(at::equal(a.tensors[0], at::ones(4))) << "written too early";
  EXPECT_TRUE(at::equal(b.tensors[0], at::full({4}, 2.0)));
  recording.complete(0);
  EXPECT_TRUE(at::equal(a.tensors[0], at::full({4}, 2.0)));
  EXPECT_THAT(recording.held(), IsEmpty());
}

TEST(RecordingGroupTest, AHeldCollectiveThatNobodyCompletesTimesOut) {
  RecordingGroup recording(2);
  recording.hold();
  Launched a = launch(recording);
  EXPECT_THROW(a.work->wait(std::chrono::milliseconds(1)),
               c10::DistBackendError);
  recording.group()->getBackend(at::kCPU)->setTimeout(
      std::chrono::milliseconds(1));
  EXPECT_THROW(launch(recording).work->wait(), c10::DistBackendError);
}

TEST(RecordingGroupTest, FailsTheChosenCollectiveAtLaunch) {
  RecordingGroup recording(2);
  recording.fail_at_launch(
      1, std::make_exception_ptr(std::domain_error("no route")));
  launch(recording);
  EXPECT_THROW(launch(recording), std::domain_error);
  EXPECT_TRUE(launch(recording).work->isSuccess());
  EXPECT_THAT(recording.log(), SizeIs(3));
}

TEST(RecordingGroupTest, FailsTheChosenCollectiveAtCompletion) {
  RecordingGroup recording(2);
  recording.fail_at_completion(
      0, std::make_exception_ptr(std::domain_error("peer gone")));
  Launched a = launch(recording);
  EXPECT_TRUE(a.work->isCompleted());
  EXPECT_FALSE(a.work->isSuccess());
  EXPECT_TRUE(a.work->getFuture()->hasError());
  EXPECT_THROW(a.work->wait(), std::domain_error);
  EXPECT_TRUE(at::equal(a.tensors[0], at::ones(4)));
}

TEST(RecordingGroupTest, AThreadOfItsOwnCompletesInTheOrderOfLaunch) {
  RecordingGroup recording(2);
  recording.complete_on_own_thread();
  std::vector<int> order;
  std::vector<Launched> launched;
  for (int i = 0; i < 3; ++i) {
    launched.push_back(launch(recording));
    launched[i].work->getFuture()->addCallback(
        [&order, i](c10::ivalue::Future&) { order.push_back(i); });
  }
  for (Launched& l : launched) {
    l.work->wait();
    EXPECT_TRUE(at::equal(l.tensors[0], at::full({4}, 2.0)));
  }
  EXPECT_THAT(order, ElementsAre(0, 1, 2));
}

TEST(RecordingGroupTest, EndsWhatIsOpenWithAnError) {
  Launched held;
  Group group;
  {
    RecordingGroup recording(2);
    group = recording.group();
    recording.hold();
    held = launch(recording);
  }
  try {
    held.work->wait();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const c10::DistBackendError& error) {
    EXPECT_THAT(error.what_without_backtrace(),
                HasSubstr("the recording group ended while"));
  }
  Tensors x = {at::ones(1)};
  group->allreduce(x)->wait();
  EXPECT_EQ(x[0].item<int>(), 2);
}

TEST(RecordingGroupTest, ACallbackMayLaunchTheNextCollective) {
  RecordingGroup recording(2);
  recording.hold();
  Launched a = launch(recording);
  a.work->getFuture()->addCallback(
      [&](c10::ivalue::Future&) { launch(recording); });
  recording.complete(0);
  EXPECT_THAT(recording.log(), SizeIs(2));
}

TEST(RecordingGroupTest, AnswersForSomeOfItsRanks) {
  const RecordingGroup recording(/*world_size=*/6, /*rank=*/4);
  const GroupScope row(make_subgroup(recording.group(), {3, 4, 5}));
  EXPECT_EQ(row.group()->getRank(), 1);
  Tensors x = {at::ones(2)};
  row.group()->allreduce(x)->wait();
  EXPECT_TRUE(at::equal(x[0], at::full(2, 3.0)));
  EXPECT_THAT(recording.log(), IsEmpty());
}

}  // namespace recording_group_test
}  // namespace brigade
