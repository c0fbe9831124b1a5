// An engine whose entries are launched on several groups, on real ranks: a mesh
// of 2 x 2, with the group of all, one of each row and one of each column.

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <latch>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/comm/process_group.h"
#include "brigade/engine/engine.h"
#include "brigade/tests/engine/scripted_policy.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::ElementsAre;
using testing::make_subgroup;
using ::testing::MatchesRegex;
using testing::on_group;
using ::testing::Pair;
using testing::run_ranks;
using testing::ScriptedEntry;
using testing::ScriptedError;
using testing::ScriptedPolicy;
using testing::Step;
using ::testing::ThrowsMessage;
using ::testing::UnorderedElementsAre;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

constexpr size_t kAll = 0;
constexpr size_t kRow = 1;
constexpr size_t kColumn = 2;

// One rank of the mesh.
class MeshRank {
 public:
  explicit MeshRank(const Group& all)
      : all_(all),
        row_(make_subgroup(all, "row", row_of(all->getRank()))),
        column_(make_subgroup(all, "column", column_of(all->getRank()))),
        policy_({all, row_.group(), column_.group()},
                {on_group(kRow, 2), on_group(kColumn, 1), on_group(kAll, 1),
                 on_group(kRow, 1), on_group(kColumn, 0), on_group(kAll, 2)}),
        random_(all->getRank()) {
    policy_.contribution = 1 << all->getRank();
    for (size_t v = 0; v < policy_.num_variables(); ++v) {
      variables_.push_back(at::ones({}).requires_grad_());
    }
    engine_ = std::make_unique<Engine>(
        std::vector{all, row_.group(), column_.group()},
        std::vector<std::vector<at::Tensor>>{variables_}, policy_,
        EngineOptions{.name = "Engine",
                      .failure_patience = std::chrono::seconds(10),
                      .one_backward_per_forward = true});
    engine_->connect();
  }

  ScriptedPolicy& policy() { return policy_; }
  Engine& engine() { return *engine_; }

  // Gradients come in an order of this rank's own.
  void step() {
    std::ranges::shuffle(variables_, random_);
    at::Tensor loss = at::zeros({});
    for (const at::Tensor& variable : variables_) loss = loss + variable;
    engine_->prepare(std::vector{loss});
    loss.backward();
  }

  // A collective of the user's.
  void all_reduce(size_t group) const {
    const std::vector<Group> groups = {all_, row_.group(), column_.group()};
    std::vector<at::Tensor> tensors = {at::ones({1})};
    groups[group]->allreduce(tensors)->wait();
  }

  // Since the last call, in order.
  std::vector<std::string> take_deliveries() {
    std::vector<std::string> events = policy_.events();
    std::erase_if(events, [](const std::string& event) {
      return !event.starts_with("deliver ");
    });
    return events;
  }

  // Rank r contributes 2^r to each sum.
  void expect_sums_of_each_group(int rank) {
    const double row = rank < 2 ? 1 + 2 : 4 + 8;
    const double column = rank % 2 == 0 ? 1 + 4 : 2 + 8;
    EXPECT_THAT(
        policy_.results(),
        UnorderedElementsAre(Pair(0, row), Pair(1, column), Pair(2, 15),
                             Pair(3, row), Pair(4, column), Pair(5, 15)));
  }

 private:
  static std::vector<int> row_of(int rank) {
    return rank < 2 ? std::vector{0, 1} : std::vector{2, 3};
  }
  static std::vector<int> column_of(int rank) {
    return rank % 2 == 0 ? std::vector{0, 2} : std::vector{1, 3};
  }

  const Group all_;
  const GroupScope row_;
  const GroupScope column_;
  ScriptedPolicy policy_;
  std::vector<at::Tensor> variables_;
  std::mt19937 random_;
  std::unique_ptr<Engine> engine_;
};

TEST(GroupsTest, EachEntryIsReducedOverItsGroup) {
  run_ranks(4, [](const Group& all) {
    MeshRank mesh_rank(all);
    for (int iteration = 0; iteration < 20; ++iteration) {
      mesh_rank.step();
      mesh_rank.expect_sums_of_each_group(all->getRank());
      EXPECT_THAT(mesh_rank.take_deliveries(),
                  ElementsAre("deliver 0", "deliver 1", "deliver 2",
                              "deliver 3", "deliver 4", "deliver 5"));
    }
    EXPECT_EQ(mesh_rank.engine().statistics().reduced, 20);
  });
}

// Whatever it had launched by then on each of its groups, and whatever its
// peers had.
TEST(GroupsTest, WhenARankFailsAllGroupsStayUsable) {
  for (const auto& [step, entry] :
       {std::pair{Step::kPack, 0}, std::pair{Step::kPack, 3},
        std::pair{Step::kPack, 5}, std::pair{Step::kPack, 1},
        std::pair{Step::kLaunch, 2}, std::pair{Step::kLaunch, 4}}) {
    for (const int failing : {0, 3}) {
      run_ranks(4, [&, step = step, entry = entry](const Group& all) {
        MeshRank mesh_rank(all);
        mesh_rank.policy().traits.fails_by_network_only = false;
        mesh_rank.policy().traits.throws_own_errors = true;
        mesh_rank.step();
        for (int round = 0; round < 3; ++round) {
          if (all->getRank() == failing) {
            mesh_rank.policy().fail(step, entry);
            EXPECT_THROW(mesh_rank.step(), ScriptedError);
          } else {
            EXPECT_THAT(
                [&] { mesh_rank.step(); },
                ThrowsMessage<c10::DistBackendError>(MatchesRegex(
                    absl::StrCat("(.|\n)*rank ", failing,
                                 " failed in iteration .* at launch [0-", entry,
                                 "]: as scripted(.|\n)*"))));
          }
          ASSERT_TRUE(mesh_rank.engine().can_continue());
          mesh_rank.step();
          mesh_rank.expect_sums_of_each_group(all->getRank());
        }
      });
    }
  }
}

TEST(GroupsTest, WhenAllRanksFailInPlacesOfTheirOwnAllGroupsStayUsable) {
  run_ranks(4, [&](const Group& all) {
    MeshRank mesh_rank(all);
    mesh_rank.policy().traits.fails_by_network_only = false;
    mesh_rank.policy().traits.throws_own_errors = true;
    std::mt19937 random(100 + all->getRank());
    for (int round = 0; round < 20; ++round) {
      mesh_rank.policy().fail(Step::kPack, random() % 4);
      EXPECT_THROW(mesh_rank.step(), ScriptedError);
      mesh_rank.step();
      mesh_rank.expect_sums_of_each_group(all->getRank());
    }
  });
}

// One that no peer of its row meets.
TEST(GroupsTest, WhenAPeerIsLostInAColumnRowsHearOfIt) {
  std::latch left(1);
  run_ranks(4, [&](const Group& all) {
    auto mesh_rank = std::make_optional<MeshRank>(all);
    mesh_rank->step();
    if (all->getRank() == 3) {
      mesh_rank.reset();
      left.count_down();
      return;
    }
    left.wait();
    EXPECT_THROW(mesh_rank->step(), c10::DistBackendError);
    EXPECT_FALSE(mesh_rank->engine().can_continue());
    for (const size_t group : {kAll, kRow, kColumn}) {
      EXPECT_ANY_THROW(mesh_rank->all_reduce(group)) << group;
    }
  });
}

// What it has launched can't be told any more, on whichever group.
TEST(GroupsTest, ALaunchThatThrowsBehindItsCollectiveClosesAllGroups) {
  for (const int entry : {0, 1, 2}) {
    run_ranks(4, [&](const Group& all) {
      MeshRank mesh_rank(all);
      mesh_rank.policy().traits.fails_by_network_only = false;
      mesh_rank.step();
      if (all->getRank() == 0) mesh_rank.policy().fail(Step::kLaunched, entry);
      EXPECT_ANY_THROW(mesh_rank.step());
      EXPECT_FALSE(mesh_rank.engine().can_continue());
      for (const size_t group : {kAll, kRow, kColumn}) {
        EXPECT_ANY_THROW(mesh_rank.all_reduce(group)) << group;
      }
    });
  }
}

// In the order of the sequence, each on its group.
TEST(GroupsTest, SecondCollectivesAreLaunchedOnTheGroupsOfTheFirst) {
  run_ranks(4, [](const Group& all) {
    MeshRank mesh_rank(all);
    mesh_rank.policy().traits.fails_by_network_only = false;
    mesh_rank.policy().chains = true;
    for (int iteration = 0; iteration < 10; ++iteration) {
      mesh_rank.step();
      const double row = all->getRank() < 2 ? 1 + 2 : 4 + 8;
      const double column = all->getRank() % 2 == 0 ? 1 + 4 : 2 + 8;
      EXPECT_THAT(mesh_rank.policy().results(),
                  UnorderedElementsAre(Pair(0, 2 * row), Pair(1, 2 * column),
                                       Pair(2, 4 * 15), Pair(3, 2 * row),
                                       Pair(4, 2 * column), Pair(5, 4 * 15)));
    }
  });
}

}  // namespace
}  // namespace brigade
