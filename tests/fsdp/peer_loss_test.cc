// Peers that die or stop in the middle of a sharded step, as processes.

#include <signal.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "brigade/comm/process_group.h"
#include "brigade/fsdp/sharded_root.h"
#include "brigade/tests/fsdp/sharded_net.h"
#include "brigade/tests/support/process_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace peer_loss_test {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;
using testing::loss_of;
using testing::Net;
using testing::ProcessRanks;
using testing::RankContext;
using testing::RankFunction;
using testing::RankResult;
using testing::sgd;
using ::testing::StartsWith;

constexpr int kLastStep = 3;

std::vector<at::Tensor> copies(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& tensor : tensors) {
    all.push_back(tensor.detach().clone());
  }
  return all;
}

bool are_equal(const std::vector<at::Tensor>& a,
               const std::vector<at::Tensor>& b) {
  return std::ranges::equal(a, b, [](const at::Tensor& x, const at::Tensor& y) {
    return at::equal(x, y);
  });
}

// Of the function below: who is lost in the last step, and where; whether all
// units are on "one mesh", some on "meshes" of their own, all "in slices" on
// two ranks each, or "kept whole" behind forward; by which signal.
std::vector<std::string> arguments(int victim, const std::string& place,
                                   const std::string& kind,
                                   int fate = SIGKILL) {
  return {std::to_string(victim), place, kind, std::to_string(fate)};
}

const RankFunction kTrainUntilLoss("train_sharded", [](RankContext& rank) {
  const bool is_victim = std::stoi(rank.arguments().at(0)) == rank.rank();
  const std::string& place = rank.arguments().at(1);
  const std::string& kind = rank.arguments().at(2);
  const int fate = std::stoi(rank.arguments().at(3));
  ProcessGroupOptions group_options;
  if (fate == SIGSTOP) group_options.timeout = std::chrono::seconds(3);
  GroupScope scope(init_process_group(group_options));
  Net net;
  ShardingOptions options;
  std::vector<UnitSpec> units = net.units();
  if (kind == "in slices") {
    options.reshards_to = 2;
  } else if (kind == "kept whole") {
    options.reshards_after_forward = false;
  } else if (kind == "meshes") {
    for (const size_t unit : {2, 3}) {
      units[unit].mesh =
          UnitMesh{.ranks = {rank.rank() % 2, rank.rank() % 2 + 2}};
    }
  } else if (scope.group()->getSize() == 4) {
    options.num_shards = 2;
  }
  ShardedRoot root(units, scope.group(), options);
  std::vector<at::Tensor> before;
  try {
    for (int step = 0; step <= kLastStep; ++step) {
      const auto is_lost_at = [&, step](const std::string& here) {
        return is_victim && step == kLastStep && place == here;
      };
      before = copies(root.shards());
      const at::Tensor loss = loss_of(root.forward([&] {
        return root.call(
            0, net.input(rank.rank(), step), [&](const at::Tensor& in) {
              at::Tensor h = in;
              for (size_t i = 0; i < net.blocks.size(); ++i) {
                h = root.call(i + 1, h, [&](const at::Tensor& x) {
                  if (is_lost_at("forward") && i == 1) raise(fate);
                  return net.blocks[i].run(x);
                });
                if ((is_lost_at("backward") && i == 1) ||
                    (is_lost_at("last block") && i == 3)) {
                  h.register_hook([fate](const at::Tensor&) { raise(fate); });
                }
              }
              return h * net.head;
            });
      }));
      if (is_lost_at("loss")) raise(fate);
      loss.backward();
      if (step < kLastStep) sgd(root.shards(), 0.1);
    }
    rank.report("went on");
  } catch (const c10::DistBackendError& error) {
    std::string text = error.what_without_backtrace();
    std::ranges::replace(text, '\n', ' ');
    rank.report("error " + text);
    rank.report(are_equal(root.shards(), before) ? "as before" : "changed");
    rank.report(std::ranges::any_of(root.shards(),
                                    [](const at::Tensor& shard) {
                                      return shard.grad().defined();
                                    })
                    ? "has gradients"
                    : "has no gradients");
    std::ostringstream file;
    torch::save(root.shards(), file);
    rank.report(file.str().empty() ? "lost" : "saved");
  }
});

void expect_as_before(const RankResult& survivor) {
  EXPECT_EQ(survivor.exit_code, 0) << survivor.error_output;
  EXPECT_THAT(survivor.messages,
              IsSupersetOf({"as before", "has no gradients", "saved"}));
}

// Ranks x where one dies x meshes.
class PeerLossTest : public ::testing::TestWithParam<
                         std::tuple<int, std::string, std::string>> {};
INSTANTIATE_TEST_SUITE_P(
    , PeerLossTest,
    ::testing::Values(std::tuple(2, "forward", "one mesh"),
                      std::tuple(3, "loss", "one mesh"),
                      std::tuple(3, "backward", "one mesh"),
                      std::tuple(4, "backward", "meshes")));

TEST_P(PeerLossTest, SurvivorsNameItAndHoldWhatTheyHeldBefore) {
  const auto [world_size, place, meshes] = GetParam();
  const int victim = world_size - 1;
  ProcessRanks ranks({.world_size = world_size,
                      .function = "train_sharded",
                      .arguments = arguments(victim, place, meshes)});
  const auto results = ranks.finish();
  EXPECT_EQ(results[victim].signal, SIGKILL);
  for (int rank = 0; rank < victim; ++rank) {
    const auto& found = results[rank];
    expect_as_before(found);
    const std::string named = "rank " + std::to_string(victim);
    EXPECT_THAT(
        found.messages,
        Contains(AllOf(StartsWith("error fully_shard: "), HasSubstr(named))));
    if (place == "forward" && world_size < 4) {  // all that is waited for
      EXPECT_THAT(found.messages,
                  Contains(HasSubstr("the gather of unit 'blocks.")));
    }
  }
}

// Sums alone are under way, of which the one that is told is not always the
// first.
TEST(SumLossTest, TheSurvivorNamesASumAndItsUnit) {
  ProcessRanks ranks({.world_size = 2,
                      .function = "train_sharded",
                      .arguments = arguments(1, "backward", "kept whole")});
  const auto results = ranks.finish();
  EXPECT_EQ(results[1].signal, SIGKILL);
  expect_as_before(results[0]);
  EXPECT_THAT(results[0].messages,
              Contains(AllOf(ContainsRegex("^error fully_shard: reduction "
                                           "[0-4] \\(unit '(blocks\\.[0-3])?', "
                                           "from parameter '(blocks\\.[0-3]\\."
                                           "weight|head)' on\\) in iteration 4 "
                                           "on rank 0: "),
                             HasSubstr("rank 1"))));
}

// Ranks, and where one stops. Its connections stay open.
class PeerStopTest
    : public ::testing::TestWithParam<std::pair<int, std::string>> {};
INSTANTIATE_TEST_SUITE_P(, PeerStopTest,
                         ::testing::Values(std::pair(2, "forward"),
                                           std::pair(3, "backward")));

TEST_P(PeerStopTest, SurvivorsNameItAtTheTimeoutAndHoldWhatTheyHeldBefore) {
  const auto& [world_size, place] = GetParam();
  const int victim = world_size - 1;
  ProcessRanks ranks(
      {.world_size = world_size,
       .function = "train_sharded",
       .arguments = arguments(victim, place, "one mesh", SIGSTOP)});
  for (int rank = 0; rank < victim; ++rank) ranks.wait_for(rank, "saved");
  ranks.signal(victim, SIGKILL);
  const auto results = ranks.finish();
  for (int rank = 0; rank < victim; ++rank) {
    expect_as_before(results[rank]);
    EXPECT_THAT(results[rank].messages,
                Contains(AllOf(StartsWith("error fully_shard: "),
                               HasSubstr("rank " + std::to_string(victim)))));
  }
}

// Its neighbour misses it in a gather; the others, who have gathered theirs, in
// a sum.
TEST(NeighbourLossTest, NeighboursMissItInTheirGather) {
  ProcessRanks ranks({.world_size = 4,
                      .function = "train_sharded",
                      .arguments = arguments(3, "last block", "in slices")});
  const auto results = ranks.finish();
  EXPECT_EQ(results[3].signal, SIGKILL);
  for (int rank = 0; rank < 3; ++rank) {
    const auto& found = results[rank];
    expect_as_before(found);
    const std::vector<std::string> words =
        rank == 2 ? std::vector<std::string>{"the gather of unit 'blocks.",
                                             "' among ranks 2-3 of a row: "}
                  : std::vector<std::string>{"", ""};
    EXPECT_THAT(
        found.messages,
        Contains(AllOf(StartsWith("error fully_shard: "), HasSubstr("rank 3"),
                       HasSubstr(words[0]), HasSubstr(words[1]))));
  }
}

}  // namespace peer_loss_test
}  // namespace brigade
