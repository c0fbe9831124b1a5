// Reproducible collectives, with ranks as threads and as processes.

#include "brigade/comm/ordered/ordered_collectives.h"

#include <signal.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <future>
#include <latch>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "brigade/comm/errors/error_texts.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/group/group_collectives.h"
#include "brigade/comm/ordered/host_sums.h"
#include "brigade/comm/process_group.h"
#include "brigade/tests/support/local_ranks.h"
#include "brigade/tests/support/process_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace ordered_collectives_test {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::ProcessRanks;
using testing::RankContext;
using testing::RankFunction;
using testing::RankResult;
using testing::run_ranks;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using FuturePtr = OrderedCollectives::FuturePtr;

// Returns the values of a rank, over many decades: another order of summation
// has other bits.
at::Tensor values_of(int rank, int64_t numel, at::ScalarType dtype,
                     uint64_t seed = 1) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(
      seed * 1000 + static_cast<uint64_t>(rank));
  const at::Tensor values =
      at::randn({numel}, generator, at::kDouble) *
      at::pow(10, at::randint(-2, 5, {numel}, generator, at::kDouble));
  if (at::isComplexType(dtype)) {
    return at::complex(values, values.flip(0)).to(dtype);
  }
  return values.to(dtype);
}

// Returns the sum over ranks, computed by one process.
at::Tensor expected_sum(int world_size, int64_t numel, at::ScalarType dtype,
                        std::optional<double> scale = std::nullopt,
                        uint64_t seed = 1) {
  const bool is_half = dtype == at::kHalf || dtype == at::kBFloat16;
  at::Tensor sum = values_of(0, numel, dtype, seed);
  if (is_half) sum = sum.to(at::kFloat);
  for (int rank = 1; rank < world_size; ++rank) {
    sum.add_(values_of(rank, numel, dtype, seed));
  }
  if (scale) sum.mul_(*scale);
  return sum.to(dtype);
}

// Parameters: world size, bytes of shared memory, ranks per host. Data go
// through shared memory, large or small, or through Gloo without it or between
// hosts.
class OrderedCollectivesTest
    : public ::testing::TestWithParam<std::tuple<int, int64_t, int>> {
 protected:
  static int world_size() { return std::get<0>(GetParam()); }
  static int64_t shared_bytes() { return std::get<1>(GetParam()); }
  static int64_t host(int rank) { return rank / std::get<2>(GetParam()); }

  // Runs `fn` on a thread for each rank.
  void run(const std::function<void(OrderedCollectives&, int rank)>& fn) {
    run_ranks(world_size(), [&](const Group& group) {
      OrderedCollectives collectives(group, shared_bytes(),
                                     host(group->getRank()));
      fn(collectives, group->getRank());
    });
  }
};
constexpr int64_t kRoom = OrderedCollectives::kSharedBytes;
constexpr int64_t kLittleRoom = int64_t{1} << 16;
constexpr int kOneHost = 100;
INSTANTIATE_TEST_SUITE_P(Shared, OrderedCollectivesTest,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4, 5, 8),
                                            ::testing::Values(kRoom),
                                            ::testing::Values(kOneHost)));
INSTANTIATE_TEST_SUITE_P(LittleRoom, OrderedCollectivesTest,
                         ::testing::Combine(::testing::Values(2, 3, 5),
                                            ::testing::Values(kLittleRoom),
                                            ::testing::Values(kOneHost)));
INSTANTIATE_TEST_SUITE_P(NoRoom, OrderedCollectivesTest,
                         ::testing::Combine(::testing::Values(2, 3, 5),
                                            ::testing::Values(0),
                                            ::testing::Values(kOneHost)));
INSTANTIATE_TEST_SUITE_P(BetweenHosts, OrderedCollectivesTest,
                         ::testing::Values(std::tuple(4, kRoom, 2),
                                           std::tuple(6, kRoom, 2),
                                           std::tuple(5, kLittleRoom, 3)));

constexpr at::ScalarType kDtypes[] = {
    at::kFloat, at::kDouble,       at::kHalf, at::kBFloat16,
    at::kLong,  at::kComplexFloat, at::kByte, at::kComplexDouble};

TEST_P(OrderedCollectivesTest, AllReduceSumsInRankOrder) {
  run([&](OrderedCollectives& collectives, int rank) {
    for (const at::ScalarType dtype : kDtypes) {
      for (const int64_t numel : {0, 1, 2, 7, 1000, 40003}) {
        const at::Tensor tensor = values_of(rank, numel, dtype);
        const FuturePtr future = collectives.all_reduce(tensor);
        future->waitAndThrow();
        EXPECT_TRUE(at::equal(tensor, expected_sum(world_size(), numel, dtype)))
            << dtype << ' ' << numel;
        EXPECT_TRUE(future->value().toTensorVector().at(0).is_same(tensor));
      }
    }
  });
}

TEST_P(OrderedCollectivesTest, ReduceScatterWritesEachRanksSlice) {
  run([&](OrderedCollectives& collectives, int rank) {
    for (const at::ScalarType dtype : kDtypes) {
      for (const int64_t numel : {0, 1, 2, 7, 1000, 40003}) {
        const at::Tensor input = values_of(rank, numel, dtype);
        const RankSlice slice = collectives.slice(numel);
        const at::Tensor output = at::empty({slice.numel}, dtype);
        collectives.reduce_scatter(input, output)->waitAndThrow();
        const at::Tensor expected = expected_sum(world_size(), numel, dtype)
                                        .narrow(0, slice.offset, slice.numel);
        EXPECT_TRUE(at::equal(output, expected)) << dtype << ' ' << numel;
        const at::Tensor unchanged = values_of(rank, numel, dtype);
        EXPECT_TRUE(at::equal(input, unchanged));
        const at::Tensor own = input.narrow(0, slice.offset, slice.numel);
        collectives.reduce_scatter(input, own)->waitAndThrow();
        EXPECT_TRUE(at::equal(own, expected)) << "into its input";
        own.copy_(unchanged.narrow(0, slice.offset, slice.numel));
        EXPECT_TRUE(at::equal(input, unchanged));
      }
    }
  });
}

TEST_P(OrderedCollectivesTest, AllGatherCopiesAllSlices) {
  run([&](OrderedCollectives& collectives, int rank) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBool, at::kShort}) {
      for (const int64_t numel : {0, 1, 2, 7, 1000, 40003}) {
        const at::Tensor whole = at::zeros({numel}, dtype);
        const RankSlice own = collectives.slice(numel);
        whole.narrow(0, own.offset, own.numel).fill_(rank + 1);
        collectives.all_gather(whole)->waitAndThrow();
        const at::Tensor expected = at::empty({numel}, dtype);
        for (int r = 0; r < world_size(); ++r) {
          const RankSlice slice = slice_of_rank(numel, r, world_size());
          expected.narrow(0, slice.offset, slice.numel).fill_(r + 1);
        }
        EXPECT_TRUE(at::equal(whole, expected)) << dtype << ' ' << numel;
      }
    }
  });
}

// A profiler may stop at any time between two collectives.
TEST_P(OrderedCollectivesTest, AProfilerSeesNoEventThatEndsLater) {
  static std::atomic<int> num_open{0};
  run_ranks(world_size(), [&](const Group& group) {
    std::optional<OrderedCollectives> collectives;
    const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(
        [](const at::RecordFunction&) -> std::unique_ptr<at::ObserverContext> {
          ++num_open;
          return nullptr;
        },
        [](const at::RecordFunction&, at::ObserverContext*) { --num_open; }));
    collectives.emplace(group, shared_bytes(), host(group->getRank()));
    const at::Tensor sum = values_of(group->getRank(), 1000, at::kFloat);
    collectives->all_reduce(sum)->waitAndThrow();
    at::removeCallback(handle);
    group->barrier()->wait();
    EXPECT_EQ(num_open, 0);
    group->barrier()->wait();
  });
}

TEST_P(OrderedCollectivesTest, SumsLargeTensors) {
  const int64_t numel = world_size() * ((int64_t{1} << 19) + 77) + 1;
  const at::Tensor expected =
      expected_sum(world_size(), numel, at::kFloat, 0.5);
  run([&](OrderedCollectives& collectives, int rank) {
    const at::Tensor tensor = values_of(rank, numel, at::kFloat);
    const RankSlice slice = collectives.slice(numel);
    const at::Tensor output = at::empty({slice.numel});
    const FuturePtr scattered = collectives.reduce_scatter(tensor, output, 0.5);
    scattered->waitAndThrow();
    collectives.all_reduce(tensor, 0.5)->waitAndThrow();
    EXPECT_TRUE(at::equal(tensor, expected));
    EXPECT_TRUE(
        at::equal(output, expected.narrow(0, slice.offset, slice.numel)));
  });
}

TEST(OrderedRoomTest, MayHaveAnySize) {
  constexpr int64_t kNumel = 503;
  const at::Tensor expected = expected_sum(3, kNumel, at::kDouble);
  run_ranks(3, [&](const Group& group) {
    for (const int64_t shared_bytes : {1, 1000, 4096}) {
      OrderedCollectives collectives(group, shared_bytes);
      EXPECT_TRUE(collectives.is_on_one_host());
      const at::Tensor own = values_of(group->getRank(), kNumel, at::kDouble);
      const RankSlice slice = collectives.slice(kNumel);
      std::vector<at::Tensor> sums;
      std::vector<at::Tensor> slices;
      std::vector<FuturePtr> in_flight;
      for (int i = 0; i < 5; ++i) {
        sums.push_back(own.clone());
        slices.push_back(at::empty({slice.numel}, at::kDouble));
        in_flight.push_back(collectives.all_reduce(sums.back()));
        in_flight.push_back(collectives.reduce_scatter(own, slices.back()));
      }
      for (const FuturePtr& future : in_flight) future->waitAndThrow();
      for (int i = 0; i < 5; ++i) {
        EXPECT_TRUE(at::equal(sums[i], expected));
        EXPECT_TRUE(at::equal(slices[i],
                              expected.narrow(0, slice.offset, slice.numel)));
      }
    }
  });
}

TEST_P(OrderedCollectivesTest, StartsAfterAFuture) {
  run([&](OrderedCollectives& collectives, int rank) {
    const at::Tensor first = at::zeros({1000});
    const auto filled = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()));
    const FuturePtr early = collectives.all_reduce(first, {}, filled);
    const at::Tensor second = values_of(rank, 70, at::kFloat);
    const FuturePtr late = collectives.all_reduce(second);
    first.copy_(values_of(rank, 1000, at::kFloat));
    filled->markCompleted(c10::IValue(std::vector<at::Tensor>{first}));
    early->waitAndThrow();
    late->waitAndThrow();
    EXPECT_TRUE(at::equal(first, expected_sum(world_size(), 1000, at::kFloat)));
    EXPECT_TRUE(at::equal(second, expected_sum(world_size(), 70, at::kFloat)));
  });
}

// Random cuts of one vector into calls.
TEST_P(OrderedCollectivesTest, BitsDoNotDependOnBucketSizes) {
  const int64_t numel = 100003;
  const at::Tensor expected = expected_sum(world_size(), numel, at::kFloat);
  run([&](OrderedCollectives& collectives, int rank) {
    std::mt19937 cuts(7);
    for (int round = 0; round < 6; ++round) {
      const at::Tensor whole = values_of(rank, numel, at::kFloat);
      std::vector<FuturePtr> in_flight;
      for (int64_t begin = 0; begin < numel;) {
        const int64_t most = round == 0 ? numel : 1 << (10 + round);
        const int64_t length = std::min<int64_t>(
            numel - begin, most - static_cast<int64_t>(cuts() % (most / 2)));
        in_flight.push_back(
            collectives.all_reduce(whole.narrow(0, begin, length)));
        begin += length;
      }
      for (const FuturePtr& future : in_flight) future->waitAndThrow();
      EXPECT_TRUE(at::equal(whole, expected)) << round;
    }
  });
}

// So far ahead that all slots for posts are in use.
TEST_P(OrderedCollectivesTest, OneRankMayBeFarAhead) {
  constexpr int kNumCalls = 3000;
  std::promise<void> launched;
  const std::shared_future<void> is_launched = launched.get_future().share();
  run([&](OrderedCollectives& collectives, int rank) {
    std::vector<at::Tensor> outputs;
    std::vector<FuturePtr> in_flight;
    const int64_t numel = 2 * world_size();
    for (int i = 0; i < kNumCalls; ++i) {
      if (rank > 0 && rank == world_size() - 1 && i == 1) is_launched.wait();
      outputs.push_back(at::empty({2}));
      in_flight.push_back(collectives.reduce_scatter(
          at::full({numel}, static_cast<double>(i)), outputs.back()));
      if (rank == 0 && i == 500) launched.set_value();
    }
    for (int i = 0; i < kNumCalls; ++i) {
      in_flight[i]->waitAndThrow();
      EXPECT_TRUE(at::equal(
          outputs[i], at::full({2}, static_cast<double>(i * world_size()))));
    }
  });
}

TEST_P(OrderedCollectivesTest, LaunchesNoCollectiveOfTheGroup) {
  run_ranks(world_size(), [&](const Group& group) {
    OrderedCollectives collectives(group, shared_bytes(),
                                   host(group->getRank()));
    const auto before = count_collectives(*group);
    std::vector<FuturePtr> in_flight;
    std::vector<at::Tensor> tensors;
    for (int i = 0; i < 5; ++i) {
      tensors.push_back(values_of(group->getRank(), 10000, at::kFloat));
      in_flight.push_back(collectives.all_reduce(tensors.back()));
    }
    EXPECT_EQ(count_collectives(*group), before);
    std::vector<at::Tensor> ones = {at::ones(10)};
    group->allreduce(ones)->wait();
    EXPECT_EQ(ones[0][0].item<int>(), world_size());
    for (int i = 0; i < 5; ++i) {
      in_flight[i]->waitAndThrow();
      EXPECT_TRUE(
          at::equal(tensors[i], expected_sum(world_size(), 10000, at::kFloat)));
    }
  });
}

// Returns the message of the exception that `fn` throws.
template <typename Error>
std::string error_of(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

TEST(OrderedCollectivesErrorTest, RejectsUnsupportedTensors) {
  run_ranks(2, [](const Group& group) {
    OrderedCollectives collectives(group);
    const auto reduce = [&](const at::Tensor& tensor) {
      return [&collectives, tensor] { collectives.all_reduce(tensor); };
    };
    const at::Tensor ones = at::ones({4, 4});
    EXPECT_THAT(error_of<c10::ValueError>(reduce(ones.t().narrow(0, 0, 2))),
                HasSubstr("contiguous"));
    EXPECT_THAT(error_of<c10::ValueError>(reduce(at::Tensor())),
                HasSubstr("undefined"));
    EXPECT_THAT(error_of<c10::ValueError>(reduce(ones.to_sparse())),
                HasSubstr("dense"));
    EXPECT_THAT(error_of<c10::ValueError>(
                    reduce(at::ones({4}, at::kComplexFloat).conj())),
                HasSubstr("resolve_conj"));
    EXPECT_THAT(error_of<c10::TypeError>(reduce(at::ones({4}, at::kBool))),
                HasSubstr("found Bool"));
  });
}

TEST_P(OrderedCollectivesTest, ARankThatLeavesFailsThePeersCalls) {
  if (world_size() == 1) GTEST_SKIP() << "needs a peer";
  run_ranks(
      world_size(),
      [&](const Group& group) {
        auto collectives = std::make_unique<OrderedCollectives>(
            group, shared_bytes(), host(group->getRank()));
        const at::Tensor first = values_of(group->getRank(), 100, at::kFloat);
        collectives->all_reduce(first)->waitAndThrow();
        EXPECT_TRUE(
            at::equal(first, expected_sum(world_size(), 100, at::kFloat)));
        std::vector<at::Tensor> ones = {at::ones(10)};
        group->allreduce(ones)->wait();  // all ranks have the first result
        if (group->getRank() == 1) collectives.reset();
        if (collectives) {
          std::vector<FuturePtr> in_flight;
          for (const int64_t numel : {10, 100000, 10000000}) {
            try {
              in_flight.push_back(collectives->all_reduce(at::ones(numel)));
            } catch (const PeerError&) {  // an earlier call has failed
            }
          }
          for (const FuturePtr& future : in_flight) {
            EXPECT_THROW(future->waitAndThrow(), PeerError);
          }
          EXPECT_THROW(collectives->all_reduce(at::ones(3))->waitAndThrow(),
                       PeerError);
        }
        ones = {at::ones(10)};
        group->allreduce(ones)->wait();
        EXPECT_EQ(ones[0][0].item<int>(), world_size());
      },
      std::chrono::minutes(10));
}

// Peers may still be in their calls.
TEST_P(OrderedCollectivesTest, ARankMayLeaveAfterItsOwnCalls) {
  const at::Tensor expected = expected_sum(world_size(), 100003, at::kFloat);
  run_ranks(world_size(), [&](const Group& group) {
    const int rank = group->getRank();
    for (int round = 0; round < 10; ++round) {
      OrderedCollectives collectives(group, shared_bytes(), host(rank));
      const at::Tensor first = values_of(rank, 100003, at::kFloat);
      const at::Tensor second = first.clone();
      const FuturePtr in_flight = collectives.all_reduce(first);
      collectives.all_reduce(second)->waitAndThrow();
      in_flight->waitAndThrow();
      EXPECT_TRUE(at::equal(first, expected));
      EXPECT_TRUE(at::equal(second, expected));
    }
  });
}

// Rank 2 reads the others' posts late, after rank 1 has left and the next sum
// has failed on rank 0.
TEST(OrderedCollectivesErrorTest, ASumThatIsCompleteOnPeersCompletes) {
  std::latch late(1);
  run_ranks(3, [&](const Group& group) {
    const int rank = group->getRank();
    auto collectives = std::make_unique<OrderedCollectives>(group);
    // One call per thread; callbacks block them on rank 2.
    const auto gate = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()));
    std::vector<FuturePtr> before;
    for (int i = 0; i < 2; ++i) {
      before.push_back(collectives->all_reduce(at::ones(10), {}, gate));
      if (rank != 2) continue;
      before.back()->addCallback([&](c10::ivalue::Future&) { late.wait(); });
    }
    gate->markCompleted(c10::IValue(std::vector<at::Tensor>{}));
    const at::Tensor tensor = at::ones(10);
    const FuturePtr sum = collectives->all_reduce(tensor);
    if (rank != 2) {
      for (const FuturePtr& future : before) future->waitAndThrow();
      sum->waitAndThrow();
    }
    if (rank == 1) collectives.reset();
    if (rank == 0) {
      EXPECT_THROW(collectives->all_reduce(at::ones(10))->waitAndThrow(),
                   PeerError);
      late.count_down();
    }
    sum->waitAndThrow();
    EXPECT_TRUE(at::equal(tensor, at::full({10}, 3.0)));
  });
}

TEST(OrderedCollectivesErrorTest, ClosingTheGroupFailsAllCalls) {
  for (const int64_t shared_bytes : {kRoom, int64_t{0}}) {
    std::promise<void> launched;
    const std::shared_future<void> is_launched = launched.get_future().share();
    run_ranks(
        2,
        [&](const Group& group) {
          OrderedCollectives collectives(group, shared_bytes);
          if (group->getRank() == 1) {
            is_launched.wait();
            close_group(*group);
          }
          const FuturePtr future = collectives.all_reduce(at::ones(100));
          if (group->getRank() == 0) launched.set_value();
          EXPECT_THROW(future->waitAndThrow(), PeerError);
        },
        std::chrono::minutes(10));
  }
}

TEST(OrderedCollectivesErrorTest, DestructionWithACallInFlightFailsThePeers) {
  run_ranks(2, [](const Group& group) {
    std::optional<OrderedCollectives> collectives(group);
    FuturePtr last;
    if (group->getRank() == 1) {
      last = collectives->all_reduce(at::ones(10));
      collectives.reset();
    }
    group->barrier()->wait();
    if (collectives) last = collectives->all_reduce(at::ones(10));
    EXPECT_THAT(
        error_of<PeerError>([&] { last->waitAndThrow(); }),
        HasSubstr(group->getRank() == 1 ? "it ended with collectives in flight"
                                        : "waiting for rank 1"));
  });
}

TEST(OrderedCollectivesErrorTest, DifferentCallsFail) {
  run_ranks(
      2,
      [](const Group& group) {
        OrderedCollectives collectives(group);
        const int64_t numel = group->getRank() == 0 ? 100 : 1000000;
        const at::Tensor tensor = at::ones(numel);
        const FuturePtr future = collectives.all_reduce(tensor);
        EXPECT_THAT(error_of<PeerError>([&] { future->waitAndThrow(); }),
                    HasSubstr("ordered collectives on rank"));
        EXPECT_TRUE(at::equal(tensor, at::ones(numel)));
      },
      std::chrono::seconds(1));
}

TEST(OrderedCollectivesErrorTest, NamesAMissingRankAtTheTimeout) {
  std::promise<void> failed;
  run_ranks(
      2,
      [&](const Group& group) {
        OrderedCollectives collectives(group);
        if (group->getRank() == 0) {
          EXPECT_THAT(error_of<PeerError>([&] {
                        collectives.all_reduce(at::ones(8))->waitAndThrow();
                      }),
                      HasSubstr("rank 0 of 2: all-reduce 1 of 8 Float, waiting "
                                "for rank 1: "));
          failed.set_value();
        } else {
          failed.get_future().wait();
          EXPECT_THROW(collectives.all_reduce(at::ones(8))->waitAndThrow(),
                       PeerError);
        }
      },
      std::chrono::seconds(1));
}

class NoAllToAll final : public c10d::Backend {
 public:
  NoAllToAll() : Backend(0, 2) {}
  const std::string getBackendName() const override { return "small"; }
};

TEST(OrderedCollectivesErrorTest, NamesABackendWithoutAllToAll) {
  NoAllToAll backend;
  EXPECT_THAT(error_of<c10::NotImplementedError>(
                  [&] { all_to_all_into(backend, at::ones(2), at::ones(2)); }),
              AllOf(HasSubstr("an all-to-all for tensors on cpu"),
                    HasSubstr("Backend small"), HasSubstr("`reproducible`")));
}

void report_failure(RankContext& rank, const FuturePtr& future) {
  future->wait();
  if (future->hasError()) rank.report(message_of(future->exception_ptr()));
}

// Reduces until a failure, and reports it.
const RankFunction kOrderedForever("ordered_forever", [](RankContext& rank) {
  GroupScope scope(init_process_group({.timeout = std::chrono::minutes(10)}));
  OrderedCollectives collectives(scope.group());
  const std::vector<at::Tensor> tensors(3, at::ones(1 << 22));
  for (int64_t iteration = 0;; ++iteration) {
    std::vector<FuturePtr> in_flight;
    for (const at::Tensor& tensor : tensors) {
      in_flight.push_back(collectives.all_reduce(tensor.clone()));
    }
    for (const FuturePtr& future : in_flight) {
      report_failure(rank, future);
      if (future->hasError()) return;
    }
    if (iteration == 1) rank.report("running");
  }
});

// The last rank is killed while it writes a message of 32 MB: the others are
// stopped and do not read.
const RankFunction kDieInAMessage("die_in_a_message", [](RankContext& rank) {
  GroupScope scope(init_process_group({.timeout = std::chrono::minutes(10)}));
  const int size = scope.group()->getSize();
  OrderedCollectives collectives(scope.group(), /*shared_bytes=*/0);
  const at::Tensor input = at::ones(size * (int64_t{1} << 23));
  const at::Tensor output = at::empty(1 << 23);
  const bool dies = rank.rank() == size - 1;
  if (dies) rank.await();
  const FuturePtr future = collectives.reduce_scatter(input, output);
  rank.report("waiting");
  report_failure(rank, future);
});

// Forks with an all-reduce in flight that waits for rank 1.
const RankFunction kForkOrdered("fork_ordered", [](RankContext& rank) {
  GroupScope scope(init_process_group());
  auto collectives = std::make_unique<OrderedCollectives>(scope.group());
  collectives->all_reduce(at::ones(10))->waitAndThrow();
  const at::Tensor tensor = at::ones(100000);
  FuturePtr in_flight;
  if (rank.rank() == 0) in_flight = collectives->all_reduce(tensor);
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    std::string error = "no error";
    try {
      collectives->all_reduce(at::ones(10));
    } catch (const c10::Error& e) {
      error = e.what_without_backtrace();
    }
    collectives.reset();
    _exit(error.find("was forked") != std::string::npos ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  rank.report("child " + std::to_string(status));
  if (rank.rank() == 1) {
    rank.await();
    in_flight = collectives->all_reduce(tensor);
  }
  in_flight->waitAndThrow();
  rank.report(at::equal(tensor, at::full({100000}, 2.0)) ? "parent continues"
                                                         : "wrong sum");
});

TEST(OrderedCollectivesErrorTest, RejectsAForkedChildAndTheParentContinues) {
  ProcessRanks ranks({.world_size = 2, .function = "fork_ordered"});
  ranks.wait_for(0, "child 0");
  ranks.tell(1, "go");
  for (const RankResult& result : ranks.finish()) {
    EXPECT_EQ(result.exit_code, 0) << result.error_output;
    EXPECT_THAT(result.messages, ElementsAre("child 0", "parent continues"));
  }
}

class OrderedPeerLossTest : public ::testing::TestWithParam<int> {
 protected:
  // The group's timeout is ten minutes.
  void expect_errors_before_the_timeout(ProcessRanks& ranks) {
    const std::vector<RankResult> results = ranks.finish();
    for (int rank = 0; rank < GetParam() - 1; ++rank) {
      EXPECT_EQ(results[rank].exit_code, 0) << results[rank].error_output;
      EXPECT_THAT(results[rank].messages,
                  Contains(HasSubstr("ordered collectives on rank")));
    }
  }
};
INSTANTIATE_TEST_SUITE_P(WorldSizes, OrderedPeerLossTest,
                         ::testing::Values(2, 3, 4));

TEST_P(OrderedPeerLossTest, AKilledRankFailsTheCallsInFlight) {
  ProcessRanks ranks({.world_size = GetParam(), .function = "ordered_forever"});
  ranks.wait_for_all("running");
  ranks.signal(GetParam() - 1, SIGKILL);
  expect_errors_before_the_timeout(ranks);
}

TEST_P(OrderedPeerLossTest, ADeathInTheMiddleOfAMessageIsDetected) {
  ProcessRanks ranks(
      {.world_size = GetParam(), .function = "die_in_a_message"});
  const int last = GetParam() - 1;
  for (int rank = 0; rank < last; ++rank) {
    ranks.wait_for(rank, "waiting");
    ranks.signal(rank, SIGSTOP);
  }
  ranks.tell(last, "go");
  ranks.wait_for(last, "waiting");
  ranks.signal(last, SIGKILL);
  for (int rank = 0; rank < last; ++rank) ranks.signal(rank, SIGCONT);
  expect_errors_before_the_timeout(ranks);
}

}  // namespace ordered_collectives_test
}  // namespace brigade
