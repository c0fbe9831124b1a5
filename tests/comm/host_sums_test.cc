// All-reduces in shared memory, with ranks as threads.

#include "brigade/comm/ordered/host_sums.h"

#include <ATen/record_function.h>
#include <torch/torch.h>

#include <atomic>
#include <latch>
#include <memory>
#include <string>
#include <vector>

#include "brigade/comm/errors/error_texts.h"
#include "brigade/comm/process_group.h"
#include "brigade/tests/support/local_ranks.h"
#include "brigade/tests/support/recording_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace host_sums_test {

using ::testing::HasSubstr;
using testing::run_ranks;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// (0 + 2^24) + 1 + 1 is 2^24 in float32, 1 + 1 + 2^24 is not.
at::Tensor values_of(int rank) {
  return at::full({5}, rank == 0 ? 0x1p24 : 1.0, at::kFloat);
}

void expect_sums(HostSums& sums, const Group& group) {
  const at::Tensor tensor = values_of(group->getRank());
  sums.all_reduce(tensor)->waitAndThrow();
  const at::Tensor expected = values_of(0);
  for (int rank = 1; rank < group->getSize(); ++rank) {
    expected.add_(values_of(rank));
  }
  EXPECT_TRUE(at::equal(tensor, expected));
}

TEST(HostSumsTest, SumsInRankOrder) {
  run_ranks(3, [](const Group& group) {
    const auto sums = HostSums::get_or_make(group, true);
    ASSERT_NE(sums, nullptr);
    expect_sums(*sums, group);
  });
}

TEST(HostSumsTest, AGroupHasOneInstance) {
  run_ranks(2, [](const Group& group) {
    const auto first = HostSums::get_or_make(group, true);
    EXPECT_EQ(HostSums::get_or_make(group, true), first);
  });
}

// A rank may have destroyed the previous instance.
TEST(HostSumsTest, MakesANewInstanceUnlessAllRanksHaveOne) {
  run_ranks(3, [](const Group& group) {
    auto first = HostSums::get_or_make(group, true);
    if (group->getRank() == 1) first = nullptr;
    const auto second = HostSums::get_or_make(group, true);
    EXPECT_NE(second, first);
    ASSERT_NE(second, nullptr);
    expect_sums(*second, group);
    EXPECT_EQ(HostSums::get_or_make(group, true), second);
  });
}

TEST(HostSumsTest, MakesANewInstanceAfterAFailure) {
  run_ranks(2, [](const Group& group) {
    const auto first = HostSums::get_or_make(group, true);
    OrderedCollectives::abort_all_of(
        *group, std::make_exception_ptr(std::runtime_error("x")));
    const auto second = HostSums::get_or_make(group, true);
    EXPECT_NE(second, first);
    expect_sums(*second, group);
  });
}

TEST(HostSumsTest, ProfilersSeeTheNameOfGloosAllReduce) {
  static std::atomic<int> num_begun = 0;
  static std::atomic<int> num_ended = 0;
  run_ranks(2, [](const Group& group) {
    const auto sums = HostSums::get_or_make(group, true);
    expect_sums(*sums, group);
    const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(
        [](const at::RecordFunction& range)
            -> std::unique_ptr<at::ObserverContext> {
          num_begun +=
              std::string(range.name()) == "gloo:all_reduce" && range.isAsync();
          return nullptr;
        },
        [](const at::RecordFunction& range, at::ObserverContext*) {
          num_ended += std::string(range.name()) == "gloo:all_reduce";
        }));
    expect_sums(*sums, group);
    expect_sums(*sums, group);
    at::removeCallback(handle);
  });
  EXPECT_EQ(num_begun, 4);
  EXPECT_EQ(num_ended, 4);
}

// Bucket memory with one owner may be donated.
TEST(HostSumsTest, HoldsNoReferenceToACompleteTensor) {
  run_ranks(2, [](const Group& group) {
    const auto sums = HostSums::get_or_make(group, true);
    const at::Tensor tensor = at::ones({4096}, at::kFloat);
    for (int i = 0; i < 100; ++i) {
      sums->all_reduce(tensor)->waitAndThrow();
      ASSERT_EQ(tensor.storage().use_count(), 1u);
    }
  });
}

TEST(HostSumsTest, CountsAsTheGroupsCollectives) {
  run_ranks(2, [](const Group& group) {
    EXPECT_EQ(HostSums::num_launches(*group), 0);
    auto sums = HostSums::get_or_make(group, true);
    const int64_t before = count_collectives(*group).value();
    expect_sums(*sums, group);
    expect_sums(*sums, group);
    EXPECT_EQ(count_collectives(*group), before + 2);
    sums = nullptr;
    EXPECT_EQ(count_collectives(*group), before + 2);
  });
}

TEST(HostSumsTest, IsNullUnlessAllRanksWantIt) {
  run_ranks(2, [](const Group& group) {
    EXPECT_EQ(HostSums::get_or_make(group, group->getRank() == 0), nullptr);
    EXPECT_NE(HostSums::get_or_make(group, true), nullptr);
  });
}

// A user's backend sees all of the group's traffic.
TEST(HostSumsTest, IsNullForAnotherBackend) {
  RecordingGroup recording(/*world_size=*/2);
  EXPECT_EQ(HostSums::get_or_make(recording.group(), true), nullptr);
  EXPECT_TRUE(recording.log().empty());
  EXPECT_EQ(HostSums::get_or_make(single_process_group(), true), nullptr);
}

// On the closing rank, and on a rank that waits for it.
TEST(HostSumsTest, FailsWhenTheGroupIsClosed) {
  std::latch is_waiting(1);
  run_ranks(2, [&](const Group& group) {
    const auto sums = HostSums::get_or_make(group, true);
    const at::Tensor tensor = values_of(group->getRank());
    if (group->getRank() == 1) {
      is_waiting.wait();
      close_group(*group);
    }
    const auto reduced = sums->all_reduce(tensor);
    is_waiting.count_down();
    reduced->wait();
    ASSERT_TRUE(reduced->hasError());
    EXPECT_THAT(
        message_of(reduced->exception_ptr()),
        HasSubstr(group->getRank() == 1 ? "the group was closed" : "rank 1"));
  });
}

TEST(HostSumsTest, ReducesDenseNumbersOnTheCpu) {
  EXPECT_TRUE(HostSums::can_reduce(at::zeros({2}, at::kBFloat16)));
  EXPECT_FALSE(HostSums::can_reduce(at::zeros({2}, at::kBool)));
  EXPECT_FALSE(HostSums::can_reduce(at::zeros({2, 2}).t()[0]));
  EXPECT_FALSE(HostSums::can_reduce(at::zeros({2, 2}).to_sparse()));
  EXPECT_FALSE(HostSums::can_reduce(
      at::zeros({2}, at::TensorOptions().device(at::kMeta))));
}

}  // namespace host_sums_test
}  // namespace brigade
