#include "brigade/comm/process_group.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <torch/torch.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/comm/errors/error_texts.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/group/group_collectives.h"
#include "brigade/comm/group/group_info.h"
#include "brigade/comm/group/launch_environment.h"
#include "brigade/comm/ordered/ordered_collectives.h"
#include "brigade/tests/support/local_ranks.h"
#include "brigade/tests/support/process_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::ProcessRanks;
using testing::RankContext;
using testing::RankFunction;
using testing::RankResult;
using testing::run_ranks;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Tensors = std::vector<at::Tensor>;

constexpr std::chrono::minutes kForever{10};

at::Tensor all_reduced(const Group& group, at::Tensor tensor) {
  std::vector<at::Tensor> tensors = {std::move(tensor)};
  group->allreduce(tensors)->wait();
  return tensors[0];
}

// Returns the text of the exception of type E that `fn` throws.
template <typename E, typename F>
std::string text_of(F fn) {
  try {
    fn();
  } catch (const E& error) {
    return error.what_without_backtrace();
  }
  return "no exception of this type";
}

// Sets an environment variable until the end of the scope.
class ScopedVariable {
 public:
  ScopedVariable(const char* name, const char* value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before;
    setenv(name, value, 1);
  }
  ~ScopedVariable() {
    if (before_) {
      setenv(name_, before_->c_str(), 1);
    } else {
      unsetenv(name_);
    }
  }

 private:
  const char* name_;
  std::optional<std::string> before_;
};

TEST(ProcessGroupTest, GroupsOfOneStoreDoNotMix) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::jthread> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      GroupScope first(make_process_group(store, rank, 2));
      GroupScope second(make_process_group(store, rank, 2));
      if (rank == 0) first.group()->getStore()->set("key", "of the first");
      if (rank == 1) second.group()->getStore()->set("key", "of the second");
      EXPECT_EQ(first.group()->getStore()->get_to_str("key"), "of the first");
      EXPECT_EQ(second.group()->getStore()->get_to_str("key"), "of the second");
      EXPECT_EQ(all_reduced(first.group(), at::ones(1)).item<float>(), 2);
      EXPECT_EQ(all_reduced(second.group(), at::ones(1)).item<float>(), 2);
    });
  }
}

TEST(ProcessGroupTest, TakesTheTimeoutFromItsOptions) {
  run_ranks(
      1,
      [](Group group) {
        EXPECT_EQ(group->getBackend(at::kCPU)->getBackendOptions()->timeout,
                  std::chrono::milliseconds(4321));
      },
      std::chrono::milliseconds(4321));
}

TEST(ProcessGroupTest, RejectsBadArguments) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_THAT(
      text_of<c10::ValueError>([&] { make_process_group(store, 2, 2); }),
      HasSubstr("found rank 2 and world size 2"));
  EXPECT_THAT(
      text_of<c10::ValueError>(
          [&] { make_process_group(store, 0, 1, {.device_type = at::kMPS}); }),
      HasSubstr(
          "expected kCPU, kCUDA, or a type with a make_backend, found mps"));
  EXPECT_THAT(text_of<c10::ValueError>([&] {
                make_process_group(store, 0, 1,
                                   {.timeout = std::chrono::milliseconds(0)});
              }),
              HasSubstr("timeout: expected > 0 ms, found 0 ms"));
  EXPECT_THAT(
      text_of<c10::ValueError>([&] { make_process_group(nullptr, 0, 1); }),
      HasSubstr("expected a store, found null"));
  EXPECT_THAT(text_of<c10::ValueError>([&] {
                init_process_group(LaunchEnvironment{.world_size = 2}, {});
              }),
              HasSubstr("expected the address of rank 0 for 2 ranks"));
  EXPECT_THAT(text_of<c10::ValueError>([] { GroupScope scope(nullptr); }),
              HasSubstr("the process group is null"));
}

TEST(ProcessGroupTest, NamesTheReasonForMissingCuda) {
  if (torch::cuda::is_available()) GTEST_SKIP() << "this machine has a GPU";
  auto store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_THAT(text_of<c10::Error>([&] {
                make_process_group(store, 0, 1, {.device_type = at::kCUDA});
              }),
              AllOf(HasSubstr("a process group for CUDA tensors"),
                    HasSubstr("at::kCPU")));
  EXPECT_THAT(text_of<c10::Error>([&] {
                init_process_group(LaunchEnvironment{.local_rank = 0},
                                   {.device_type = at::kCUDA});
              }),
              AllOf(HasSubstr("CUDA"), HasSubstr("at::kCPU")));
}

TEST(ProcessGroupTest, UsesAllInterfacesOfTheVariable) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  {
    ScopedVariable variable("GLOO_SOCKET_IFNAME", "lo,lo");
    const Group group = make_process_group(store, 0, 1);
    EXPECT_EQ(all_reduced(group, at::ones(1)).item<float>(), 1);
  }
  {
    ScopedVariable variable("GLOO_SOCKET_IFNAME", "nosuch0");
    EXPECT_THAT(text_of<c10::Error>([&] { make_process_group(store, 0, 1); }),
                AllOf(HasSubstr("rank 0 of 1 could not connect"),
                      HasSubstr("nosuch0")));
  }
}

size_t count_entries(const char* folder) {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry :
       std::filesystem::directory_iterator(folder)) {
    ++count;
  }
  return count;
}

TEST(SingleProcessGroupTest, NeedsNoThreadAndNoSocket) {
  all_reduced(single_process_group(), at::ones(1));  // initializes lazily
  const size_t threads = count_entries("/proc/self/task");
  const size_t descriptors = count_entries("/proc/self/fd");
  const Group group = single_process_group();
  EXPECT_EQ(all_reduced(group, at::full({3}, 5.0)).sum().item<float>(), 15);
  EXPECT_EQ(count_entries("/proc/self/task"), threads);
  EXPECT_EQ(count_entries("/proc/self/fd"), descriptors);
}

TEST(SingleProcessGroupTest, CompletesEveryCollective) {
  const Group group = single_process_group();
  EXPECT_EQ(group->getRank(), 0);
  EXPECT_EQ(group->getSize(), 1);
  at::Tensor input = at::arange(6, at::kFloat);
  Tensors inputs = {input};
  std::vector<Tensors> lists = {inputs};
  using Call = std::function<c10::intrusive_ptr<c10d::Work>(Tensors&)>;
  for (const Call& call : std::vector<Call>{
           [&](Tensors& to) { return all_gather_into(*group, to[0], input); },
           [&](Tensors& to) {
             return reduce_scatter_into(*group, to[0], input);
           },
           [&](Tensors& to) { return all_to_all_into(*group, to[0], input); },
           [&](Tensors& to) { return group->alltoall(to, inputs); },
           [&](Tensors& to) { return group->scatter(to, lists); },
           [&](Tensors& to) { return group->reduce_scatter(to, lists); },
           [&](Tensors& to) {
             std::vector<Tensors> by_rank = {to};
             return group->allgather(by_rank, inputs);
           },
           [&](Tensors& to) {
             std::vector<Tensors> by_rank = {to};
             return group->gather(by_rank, inputs);
           }}) {
    Tensors outputs = {at::zeros(6)};
    const auto work = call(outputs);
    EXPECT_TRUE(work->wait());
    EXPECT_TRUE(at::equal(outputs[0], at::arange(6, at::kFloat)));
    EXPECT_TRUE(
        work->getFuture()->value().toTensorVector()[0].is_same(outputs[0]));
  }
  group->broadcast(inputs)->wait();
  group->allreduce(inputs)->wait();
  group->reduce(inputs)->wait();
  group->barrier()->wait();
  EXPECT_TRUE(at::equal(input, at::arange(6, at::kFloat)));
  group->getStore()->set("key", "value");
  EXPECT_EQ(group->getStore()->get_to_str("key"), "value");
}

TEST(InitProcessGroupTest, AWorldOfOneFromALauncherOpensNoConnection) {
  const LaunchEnvironment env = {.master_addr = "192.0.2.1",  // nobody there
                                 .master_port = 1};
  const Group group = init_process_group(env, {});
  EXPECT_EQ(all_reduced(group, at::ones(1)).item<float>(), 1);
}

// Returns a port that was free a moment ago.
uint16_t free_port() {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  return c10d::TCPStore("127.0.0.1", options).getPort();
}

TEST(InitProcessGroupTest, NamesTheAddressWithoutAServer) {
  const uint16_t port = free_port();
  const LaunchEnvironment env = {.rank = 1,
                                 .world_size = 2,
                                 .local_rank = 1,
                                 .master_addr = "127.0.0.1",
                                 .master_port = port};
  EXPECT_THAT(
      text_of<PeerError>([&] {
        init_process_group(env, {.timeout = std::chrono::milliseconds(300)});
      }),
      AllOf(
          HasSubstr(
              "rank 1 of 2 could not connect to the other ranks at 127.0.0.1:" +
              std::to_string(port)),
          HasSubstr("within 300 ms")));
}

// Accepts connections and never replies.
class SilentListener {
 public:
  SilentListener() : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address = {.sin_family = AF_INET};
    address.sin_addr.s_addr = ::htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address);
    auto* const any = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(::bind(socket_, any, length), 0);
    EXPECT_EQ(::listen(socket_, 8), 0);
    EXPECT_EQ(::getsockname(socket_, any, &length), 0);
    port_ = ::ntohs(address.sin_port);
  }
  ~SilentListener() { ::close(socket_); }

  uint16_t port() const { return port_; }

 private:
  const int socket_;
  uint16_t port_ = 0;
};

TEST(InitProcessGroupTest, TimesOutIfAnotherProgramHoldsThePort) {
  const SilentListener listener;
  for (int rank = 0; rank < 2; ++rank) {
    const LaunchEnvironment env = {.rank = rank,
                                   .world_size = 2,
                                   .local_rank = rank,
                                   .master_addr = "127.0.0.1",
                                   .master_port = listener.port()};
    EXPECT_THAT(
        text_of<PeerError>([&] {
          init_process_group(env, {.timeout = std::chrono::milliseconds(100)});
        }),
        HasSubstr(absl::StrCat("rank ", rank,
                               " of 2 could not connect to the other ranks "
                               "at 127.0.0.1:",
                               listener.port())));
  }
}

TEST(GroupScopeTest, ARankMayEndItsGroupAtOnce) {
  for (int i = 0; i < 20; ++i) {
    run_ranks(3, [](const Group&) {});
  }
}

TEST(GroupScopeTest, CompletesCollectivesInFlight) {
  std::vector<at::Tensor> tensors(2);
  run_ranks(2, [&](Group group) {
    std::vector<at::Tensor> mine = {at::ones(1 << 20)};
    tensors[group->getRank()] = mine[0];
    group->allreduce(mine);  // no wait()
  });
  EXPECT_EQ(tensors[0].sum().item<float>(), 2 << 20);
  EXPECT_EQ(tensors[1].sum().item<float>(), 2 << 20);
}

// Without the abort, rank 1 would wait for ten minutes.
TEST(GroupScopeTest, AnExceptionOnOneRankAbortsTheOthersCollectives) {
  std::string text;
  EXPECT_THROW(run_ranks(
                   2,
                   [&](Group group) {
                     if (group->getRank() == 0) throw std::domain_error("mine");
                     try {
                       all_reduced(group, at::ones(1));
                     } catch (const std::exception& error) {
                       text = error.what();
                     }
                   },
                   kForever),
               std::domain_error);
  EXPECT_THAT(text, HasSubstr("onnection"));
}

// Rank 1 never joins the collective, and stays until rank 0 has left.
TEST(GroupScopeTest, AnExceptionAbortsOwnCollectives) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  const ProcessGroupOptions options = {.timeout = kForever};
  std::atomic<bool> gone = false;
  std::jthread rank_1([&] {
    GroupScope scope(make_process_group(store, 1, 2, options));
    gone.wait(false);
  });
  EXPECT_THROW(
      {
        GroupScope scope(make_process_group(store, 0, 2, options));
        std::vector<at::Tensor> tensors = {at::ones(4)};
        scope.group()->allreduce(tensors);
        throw std::domain_error("mine");
      },
      std::domain_error);
  gone = true;
  gone.notify_all();
}

const RankFunction kSum("sum", [](RankContext& rank) {
  GroupScope scope(init_process_group());
  const at::Tensor sum =
      all_reduced(scope.group(), at::full({4}, rank.rank() + 1.0));
  rank.report("sum " + std::to_string(sum.sum().item<int>()));
});

class ProcessesTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Processes, ProcessesTest, ::testing::Values(1, 2, 3));

TEST_P(ProcessesTest, StartFromTheEnvironmentAndShutDown) {
  const int world_size = GetParam();
  ProcessRanks ranks({.world_size = world_size, .function = "sum"});
  const int expected = 4 * world_size * (world_size + 1) / 2;
  for (const RankResult& result : ranks.finish()) {
    EXPECT_EQ(result.exit_code, 0) << result.error_output;
    EXPECT_THAT(result.messages,
                ::testing::ElementsAre("sum " + std::to_string(expected)));
    EXPECT_EQ(result.error_output, "");
  }
}

TEST(ProcessesTest, RankZeroHostsTheStoreWhenNoAgentDoes) {
  ProcessRanks ranks(
      {.world_size = 2,
       .function = "sum",
       .environment = {{"TORCHELASTIC_USE_AGENT_STORE", std::nullopt},
                       {"MASTER_PORT", std::to_string(free_port())}}});
  for (const RankResult& result : ranks.finish()) {
    EXPECT_EQ(result.exit_code, 0) << result.error_output;
    EXPECT_THAT(result.messages, ::testing::ElementsAre("sum 12"));
  }
}

TEST(ProcessesTest, AMissingVariableIsTheOnlyErrorOfARank) {
  ProcessRanks ranks({.world_size = 1,
                      .function = "sum",
                      .environment = {{"WORLD_SIZE", std::nullopt}}});
  const RankResult result = ranks.finish()[0];
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.error_output,
              HasSubstr("environment variable WORLD_SIZE is missing"));
}

TEST(RankNamesTest, OfASubgroupAreThoseOfTheWholeGroup) {
  run_ranks(4, [](const Group& group) {
    EXPECT_EQ(RankNames::of(*group)[3], 3);
    EXPECT_EQ(RankNames::of(*group).describe(1, 4), "rank 1 of 4");
    if (group->getRank() == 0) {
      make_subgroup(group, {0});
      return;
    }
    const GroupScope part = make_subgroup(group, {1, 2, 3});
    const RankNames names = RankNames::of(*part.group());
    EXPECT_EQ(names[0], 1);
    EXPECT_EQ(names.describe(0, 3), "rank 1, of ranks 1, 2, 3");
    if (group->getRank() == 1) {
      make_subgroup(part.group(), {0});
      return;
    }
    const GroupScope inner = make_subgroup(part.group(), {1, 2});
    EXPECT_EQ(RankNames::of(*inner.group()).describe(1, 2),
              "rank 3, of ranks 2, 3");
  });
}

// The second rank of each pair leaves.
TEST(RankNamesTest, AppearInErrors) {
  run_ranks(4, [](const Group& group) {
    const int first = group->getRank() / 2 * 2;
    const GroupScope pair = make_subgroup(group, {first, first + 1});
    OrderedCollectives collectives(pair.group());
    if (pair.group()->getRank() == 1) return;
    const auto reduced = collectives.all_reduce(at::ones({4}));
    reduced->wait();
    ASSERT_TRUE(reduced->hasError());
    EXPECT_THAT(
        message_of(reduced->exception_ptr()),
        AllOf(HasSubstr(absl::StrCat("ordered collectives on rank ", first,
                                     ", of ranks ", first, ", ", first + 1)),
              HasSubstr(absl::StrCat("rank ", first + 1, " "))));
  });
}

std::string host_error(const std::vector<int64_t>& host_by_rank) {
  return text_of<c10::ValueError>([&] { ranks_of_a_host(host_by_rank); });
}

TEST(RanksOfHostTest, CountsTheRanksOfEachHost) {
  EXPECT_EQ(ranks_of_a_host({7}), 1);
  EXPECT_EQ(ranks_of_a_host({7, 7, 7}), 3);
  EXPECT_EQ(ranks_of_a_host({7, 8, 9}), 1);
  EXPECT_EQ(ranks_of_a_host({7, 7, 7, -9, -9, -9, 3, 3, 3}), 3);
}

TEST(RanksOfHostTest, RejectsUnequalOrInterleavedHosts) {
  EXPECT_THAT(host_error({7, 7, 8}),
              AllOf(HasSubstr("ranks 0, 1 on one host, rank 2 on another"),
                    HasSubstr("number of shards")));
  EXPECT_THAT(host_error({7, 8, 8}), HasSubstr("ranks 1, 2 on another"));
  EXPECT_THAT(host_error({7, 8, 7, 8}),
              HasSubstr("ranks 0, 2 on one host, ranks 1, 3 on another"));
  EXPECT_THAT(host_error({7, 0, 7}), HasSubstr("no host identity on rank 1"));
}

TEST(RanksOfHostTest, CountsTheRanksOfThisHost) {
  for (const int num_ranks : {1, 2, 4}) {
    run_ranks(num_ranks, [&](const Group& group) {
      EXPECT_EQ(ranks_of_a_host(group), num_ranks);
    });
  }
}

}  // namespace
}  // namespace brigade
