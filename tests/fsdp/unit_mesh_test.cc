// Units that are sharded over some ranks each, inside of a root of all ranks:
// equal to one process that has all experts, in whole numbers.

#include "brigade/fsdp/units/unit_mesh.h"

#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/fsdp/checkpoint_model.h"
#include "brigade/fsdp/sharded_root.h"
#include "brigade/fsdp/units/reduction_hook.h"
#include "brigade/tests/checkpoint/checkpoint_checks.h"
#include "brigade/tests/fsdp/message_of_call.h"
#include "brigade/tests/fsdp/moe_net.h"
#include "brigade/tests/fsdp/sharded_net.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace unit_mesh_test {

using ::testing::AllOf;
using testing::error_of;
using testing::ExpertMesh;
using ::testing::HasSubstr;
using testing::message_of;
using testing::MoeLayout;
using testing::MoeNet;
using testing::MoeReference;
using testing::part_of;
using testing::run_ranks;
using testing::step_shards;
using testing::Tensors;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using LeftOut = std::function<std::set<size_t>(int rank)>;

int every_other(int rank) { return rank % 2; }
int neighbours(int rank) { return rank / 2; }
int own(int rank) { return rank; }
int all(int /*rank*/) { return 0; }

const MoeLayout kExperts = {.experts = {{every_other}}};

std::vector<MoeLayout> layouts() {
  return {
      kExperts,
      {.experts = {{every_other}, {neighbours}}},
      {.experts = {{neighbours}, {own}, {neighbours}}},
      // Copies in a mesh; in the root; in both.
      {.experts = {{every_other, 1}}},
      {.num_shards = 2, .experts = {{every_other}, {neighbours}}},
      {.num_shards = 1, .experts = {{every_other, 1}, {own}}},
      // The ranks of the root, in other rows.
      {.experts = {{all, 2}}},
      {.num_shards = 2, .experts = {{all}, {every_other}}},
      {.num_ranks = 8, .num_shards = 4, .experts = {{every_other, 2}}},
      // Not in turns.
      {.num_ranks = 6, .experts = {{[](int r) { return r == 1 || r > 3; }}}},
  };
}

// Groups; copies in the root, and in a mesh.
std::vector<MoeLayout> some_layouts() {
  return {{.experts = {{every_other}, {own}}},
          {.num_shards = 2, .experts = {{neighbours, 1}, {every_other}}}};
}

// A rank's net, sharded.
struct Rank {
  // `slices`: by unit, what it reshards to.
  Rank(const MoeLayout& layout, const Group& group,
       ShardingOptions options = {}, const std::map<size_t, int>& slices = {})
      : rank(group->getRank()),
        net(layout, rank, tensors),
        root(with_slices(net.units(), slices), group,
             with_shards(options, layout)) {}

  static ShardingOptions with_shards(ShardingOptions options,
                                     const MoeLayout& layout) {
    options.num_shards = layout.num_shards;
    return options;
  }

  static std::vector<UnitSpec> with_slices(
      std::vector<UnitSpec> units, const std::map<size_t, int>& slices) {
    for (const auto& [unit, number] : slices) units[unit].reshards_to = number;
    return units;
  }

  void backward(int step, const LeftOut& left_out = {}) {
    net.sharded_loss(root, step, left_out ? left_out(rank) : std::set<size_t>())
        .backward();
  }

  void expect_gradients(const MoeReference& reference) {
    for (size_t unit = 0; unit < root.num_units(); ++unit) {
      const Unit& own_unit = root.unit(unit);
      const int shard_rank = own_unit.segments.front()->rank();
      for (size_t i = 0; i < own_unit.shards.size(); ++i) {
        const at::Tensor& found = own_unit.shards[i].grad();
        const at::Tensor expected = part_of(reference.gradient(rank, unit, i),
                                            root, unit, i, shard_rank);
        ASSERT_TRUE(found.defined()) << "unit " << unit;
        EXPECT_TRUE(at::equal(found.flatten(), expected))
            << "rank " << rank << " unit " << unit << " parameter " << i << ": "
            << found << ", expected " << expected;
      }
    }
  }

  void expect_wholes(const MoeReference& reference) {
    for (size_t unit = 0; unit < root.num_units(); ++unit) {
      const std::vector<at::Tensor> wholes = root.gather_unit(unit);
      for (size_t i = 0; i < wholes.size(); ++i) {
        EXPECT_TRUE(at::equal(wholes[i],
                              reference.net(rank).parameters(unit)[i].second))
            << "rank " << rank << " unit " << unit << " parameter " << i;
      }
    }
  }

  const int rank;
  Tensors tensors;
  MoeNet net;
  ShardedRoot root;
};

// `steps` of all ranks, each compared.
void expect_trains(Rank& rank, MoeReference& reference, int from, int to,
                   const std::function<LeftOut(int step)>& left_out = {}) {
  for (int step = from; step < to; ++step) {
    const LeftOut leaves = left_out ? left_out(step) : LeftOut();
    rank.backward(step, leaves);
    reference.backward(step, leaves);
    rank.expect_gradients(reference);
    step_shards(rank.root);
    reference.step();
  }
  rank.expect_wholes(reference);
}

TEST(UnitMeshTest, TrainsAsOneProcessDoes) {
  bool reshards = false;
  for (const MoeLayout& layout : layouts()) {
    reshards = !reshards;
    run_ranks(layout.num_ranks, [&](const Group& group) {
      MoeReference reference(layout);
      Rank rank(layout, group, {.reshards_after_forward = reshards});
      expect_trains(rank, reference, 0, 4);
      const ShardingStatistics statistics = rank.root.statistics();
      EXPECT_EQ(statistics.late_gathers, 0);
      EXPECT_EQ(statistics.unplanned, 0);
      EXPECT_EQ(statistics.peak_whole_bytes, statistics.planned_bytes);
    });
  }
}

TEST(UnitMeshTest, ShardsAreThoseOfTheUnitsMesh) {
  run_ranks(4, [](const Group& group) {
    const Rank rank({.num_shards = 2, .experts = {{own}, {every_other}, {all}}},
                    group);
    const auto numel_of = [&](size_t unit) {
      int64_t numel = 0;
      for (const at::Tensor& shard : rank.root.shards_of(unit)) {
        numel += shard.numel();
      }
      return numel;
    };
    EXPECT_EQ(numel_of(1), 7);   // of 14, over rows of 2
    EXPECT_EQ(numel_of(2), 14);  // of one rank alone
    EXPECT_EQ(numel_of(3), 7);
    EXPECT_EQ(rank.root.unit(4).segments.front()->layout().shard_numel(), 4);
    const std::string text = rank.root.explain();
    EXPECT_THAT(text, HasSubstr(rank.rank % 2 == 0 ? "over ranks 0, 2\n"
                                                   : "over ranks 1, 3\n"));
    EXPECT_THAT(text, HasSubstr("over ranks 0, 1, 2, 3\n"));
  });
}

TEST(UnitMeshTest, RanksMayLeaveExpertsOut) {
  const MoeLayout layout = {.experts = {{every_other}, {neighbours}}};
  // One rank; a whole mesh; all ranks another one.
  const std::vector<LeftOut> programs = {
      [](int r) { return r == 2 ? std::set<size_t>{2} : std::set<size_t>(); },
      [](int r) {
        return every_other(r) == 1 ? std::set<size_t>{2} : std::set<size_t>();
      },
      [](int r) {
        return r % 3 == 0 ? std::set<size_t>{2} : std::set<size_t>{3};
      },
  };
  run_ranks(4, [&](const Group& group) {
    MoeReference reference(layout);
    Rank rank(layout, group);
    expect_trains(rank, reference, 0, 12, [&](int step) {
      return programs[(step / 2) % programs.size()];
    });
  });
}

TEST(UnitMeshTest, NobodysExpertKeepsItsGradient) {
  run_ranks(4, [](const Group& group) {
    MoeReference reference(kExperts);
    Rank rank(kExperts, group);
    rank.backward(0, [](int) { return std::set<size_t>{2}; });
    EXPECT_FALSE(rank.root.shards_of(2)[0].grad().defined());
    EXPECT_TRUE(rank.root.shards_of(1)[0].grad().defined());
  });
}

// Of three backwards each, `lets_sum` tells the root before the last that it
// may sum over ranks, and before the others that it may not.
void expect_that_backwards_add_up(void (*lets_sum)(ShardedRoot& root,
                                                   bool value)) {
  for (const MoeLayout& layout : some_layouts()) {
    run_ranks(layout.num_ranks, [&](const Group& group) {
      MoeReference reference(layout);
      Rank rank(layout, group);
      for (int step = 0; step < 2; ++step) {
        for (int batch = 0; batch < 3; ++batch) {
          lets_sum(rank.root, batch == 2);
          rank.backward(3 * step + batch);
          reference.backward(3 * step + batch);
        }
        rank.expect_gradients(reference);
        step_shards(rank.root);
        reference.step();
      }
    });
  }
}

TEST(UnitMeshTest, AddsUpWithoutSynchronisation) {
  expect_that_backwards_add_up(
      [](ShardedRoot& root, bool value) { root.set_synchronizes(value); });
}

// Meshes of one row sum at once what those of several keep.
TEST(UnitMeshTest, RowsAloneMayAddUp) {
  expect_that_backwards_add_up([](ShardedRoot& root, bool value) {
    root.set_sums_over_replicas(value);
  });
}

// Neighbours in the mesh's rows, not in the root's, and a comm hook of all.
TEST(UnitMeshTest, UnitsStayInSlicesAndAreCompressedOnTheirMeshes) {
  const MoeLayout layout = {.num_shards = 2, .experts = {{all}, {every_other}}};
  run_ranks(4, [&](const Group& group) {
    const std::shared_ptr<ReductionHook> none;
    for (const auto& hook : {none, compression_hook(at::kHalf)}) {
      MoeReference reference(layout);
      Rank rank(layout, group, {.comm_hook = hook}, /*slices=*/{{2, 2}});
      expect_trains(rank, reference, 0, 2);
      EXPECT_EQ(rank.root.statistics().near_gathers, 2);

      // Of 14 elements each, of 16 on four ranks; the first unit is kept.
      const ShardingStatistics before = rank.root.statistics();
      rank.backward(2);
      const ShardingStatistics after = rank.root.statistics();
      EXPECT_EQ(after.sent_by_gathers - before.sent_by_gathers,
                8 * (7 + 2 * 7 + (12 + 8) + 2 * 7));
      EXPECT_EQ(after.sent_by_sums - before.sent_by_sums,
                (hook ? 2 : 8) * ((7 + 7) + (7 + 7) + 12 + 7));
      EXPECT_EQ(after.near_gathers, 3);
      EXPECT_EQ(after.late_gathers, 0);
      EXPECT_EQ(after.unplanned, 0);
      EXPECT_THAT(rank.root.explain(),
                  HasSubstr("in slices on 2 ranks in between, over ranks 0, "));
    }
    Rank rank(layout, group, {}, /*slices=*/{{2, 2}});
    rank.root.settings(3).reshards_to = 2;
    EXPECT_THAT(message_of([&] { rank.backward(0); }),
                HasSubstr("is to be resharded to 2 ranks, found groups of []"));
    EXPECT_THAT(message_of([&] {
                  Rank(layout, group, {}, /*slices=*/{{3, 2}});
                }),
                HasSubstr("less than the number of shards, 2"));
  });
}

TEST(UnitMeshTest, AFailureIsOneOnAllMeshes) {
  for (const bool in_backward : {false, true}) {
    for (const int failing : {0, 3}) {
      std::vector<std::string> texts(4);
      const MoeLayout layout = {.experts = {{every_other}, {neighbours}}};
      run_ranks(4, [&](const Group& group) {
        MoeReference reference(layout);
        Rank rank(layout, group);
        expect_trains(rank, reference, 0, 2);
        const auto fail_here = [&](const char* where) {
          TORCH_CHECK(rank.rank != failing, "fails in ", where);
        };
        try {
          at::Tensor loss = rank.root.forward([&] {
            return rank.net.loss(
                2, {}, [&](size_t unit, const at::Tensor& in, const auto& run) {
                  if (unit == 2 && !in_backward) fail_here("forward");
                  at::Tensor out = rank.root.call(unit, in, run);
                  if (unit == 2 && in_backward) {
                    out.register_hook(
                        [&](const at::Tensor&) { fail_here("backward"); });
                  }
                  return out;
                });
          });
          loss.backward();
        } catch (const std::exception& error) {
          texts[rank.rank] = error.what();
        }
        EXPECT_TRUE(rank.root.can_continue());
        for (const at::Tensor& shard : rank.root.shards()) {
          EXPECT_FALSE(shard.grad().defined());
        }
        expect_trains(rank, reference, 3, 6);
      });
      for (int rank = 0; rank < 4; ++rank) {
        EXPECT_THAT(texts[rank],
                    HasSubstr(rank != failing
                                  ? absl::StrCat("rank ", failing, " failed")
                              : in_backward ? "fails in backward"
                                            : "fails in forward"));
      }
    }
  }
}

// A unit's name may differ where it is needed more often than was expected.
TEST(UnitMeshTest, AUnitMayBeNeededAgain) {
  run_ranks(4, [](const Group& group) {
    Rank rank(kExperts, group);
    rank.root.forward([&] {
      const at::Tensor x = torch::ones({7}, torch::kDouble);
      for (int time = 0; time < 2; ++time) {
        rank.root.call(2, x, [](const at::Tensor& in) { return in; });
      }
      return 0;
    });
    EXPECT_GT(rank.root.statistics().late_gathers, 0);
  });
}

TEST(UnitMeshTest, RanksMayHaveNoData) {
  run_ranks(4, [](const Group& group) {
    MoeReference reference(kExperts);
    Rank rank(kExperts, group);
    EXPECT_EQ(rank.root.num_ranks_with(rank.rank != 1), 3);
    if (rank.rank == 1) {
      rank.root.step_without_data();
    } else {
      rank.backward(0);
    }
    for (const int r : {0, 2, 3}) reference.net(r).plain_loss(0).backward();
    rank.expect_gradients(reference);
  });
}

// As it may be where each rank makes its experts: what is inside of what, by
// their names, differs.
TEST(UnitMeshTest, UnitsOnOtherRanksMayHaveOtherNames) {
  run_ranks(2, [](const Group& group) {
    const int rank = group->getRank();
    const auto ones = [] { return torch::ones({4}).requires_grad_(); };
    const std::vector<at::Tensor> weights = {ones(), ones(), ones()};
    const std::vector<UnitSpec> units = {
        {.name = "", .parameters = {{"weight", weights[0]}}},
        {.name = "layer", .parameters = {{"layer.weight", weights[1]}}},
        {.name = rank == 0 ? "layer.experts" : "my_experts",
         .parameters = {{rank == 0 ? "layer.experts.weight" : "my.weight",
                         weights[2]}},
         .mesh = UnitMesh{.ranks = {rank}}}};
    ShardedRoot root(units, group, {.reshards_after_forward = true});
    for (int step = 0; step < 2; ++step) {
      const at::Tensor loss = root.forward([&] {
        return root.call(0, torch::ones({4}), [&](const at::Tensor& x) {
          return root.call(1, x * weights[0], [&](const at::Tensor& h) {
            return root.call(2, h * weights[1], [&](const at::Tensor& y) {
              return (y * weights[2]).sum();
            });
          });
        });
      });
      loss.backward();
      for (const at::Tensor& shard : root.shards()) {
        EXPECT_TRUE(at::equal(shard.grad(), torch::ones_like(shard)));
        at::Tensor(shard).mutable_grad().reset();
      }
    }
  });
}

// ---- What can't work.

// The error that each rank gets for its mesh, which changes no parameter.
std::vector<std::string> errors_of(
    const std::function<std::optional<UnitMesh>(int rank)>& mesh_of,
    const std::function<std::string(int rank)>& name_of = {}) {
  std::vector<std::string> texts(4);
  run_ranks(4, [&](const Group& group) {
    const int rank = group->getRank();
    const at::Tensor weight = torch::ones({5}).requires_grad_();
    const at::Tensor expert = torch::full({5}, 1.0 * rank).requires_grad_();
    const std::vector<UnitSpec> units = {
        {.name = "", .parameters = {{"weight", weight}}},
        {.name = name_of ? name_of(rank) : "expert",
         .parameters = {{"expert.weight", expert}},
         .mesh = mesh_of(rank)}};
    texts[rank] = error_of([&] { ShardedRoot root(units, group, {}); });
    if (texts[rank] == "no error") return;
    EXPECT_TRUE(at::equal(expert, torch::full({5}, 1.0 * rank)));
  });
  for (const std::string& text : texts) EXPECT_EQ(text, texts[0]);
  return texts;
}

TEST(UnitMeshTest, MeshesThatDontFitAreOneErrorOnAllRanks) {
  EXPECT_THAT(errors_of([](int rank) {
                return UnitMesh{.ranks = rank == 3   ? std::vector{2, 3}
                                         : rank == 1 ? std::vector{1, 3}
                                                     : std::vector{0, 2}};
              })[0],
              AllOf(HasSubstr("the mesh of unit 'expert'"),
                    HasSubstr("expected its ranks to name the same ones"),
                    HasSubstr("Each rank of the root is in one mesh")));
  EXPECT_THAT(errors_of([](int rank) {
                return UnitMesh{.ranks = {rank % 2, rank % 2 + 2, rank + 4}};
              })[0],
              HasSubstr("expected ranks of the root, of which there are 4"));
  EXPECT_THAT(errors_of([](int rank) {
                return UnitMesh{.ranks = {0, rank == 0 ? 1 : 2}};
              })[0],
              HasSubstr("in rising order, rank 1 among them, found 0, 2"));
  EXPECT_THAT(
      errors_of([](int rank) {
        return UnitMesh{.ranks = {rank % 2, rank % 2 + 2}, .num_shards = 4};
      })[0],
      HasSubstr("expected num_shards to divide its number of ranks, 2, "
                "found 4"));
  EXPECT_THAT(
      errors_of([](int rank) {
        return rank < 2 ? UnitMesh{.ranks = {0, 1}} : UnitMesh{.ranks = {rank}};
      })[0],
      HasSubstr("groups of 2 ranks"));
  EXPECT_THAT(errors_of([](int rank) -> std::optional<UnitMesh> {
                if (rank == 3) return std::nullopt;
                return UnitMesh{.ranks = {0, 1, 2, 3}};
              })[0],
              HasSubstr("mesh of its own"));
}

TEST(UnitMeshTest, RanksOfOneMeshHaveTheSameNames) {
  const auto mesh_of = [](int rank) {
    return UnitMesh{.ranks = {rank % 2, rank % 2 + 2}};
  };
  EXPECT_THAT(
      errors_of(mesh_of, [](int r) { return absl::StrCat("e", r / 3); })[0],
      HasSubstr("expected the same names, sharded in the same order, on ranks "
                "1, 3, found others"));
  EXPECT_EQ(
      errors_of(mesh_of, [](int r) { return absl::StrCat("e", r % 2); })[0],
      "no error");
}

TEST(UnitMeshTest, OptionsMayNameMeshes) {
  run_ranks(4, [](const Group& group) {
    MoeReference reference(kExperts);
    const int rank = group->getRank();
    Tensors tensors;
    const MoeNet net(kExperts, rank, tensors);
    std::vector<UnitSpec> units = net.units();
    for (UnitSpec& unit : units) unit.mesh.reset();
    ShardedRoot root(units, group, {.mesh_of = [&](const std::string& unit) {
                       return unit.starts_with("experts")
                                  ? std::optional(net.mesh_of(2))
                                  : std::nullopt;
                     }});
    net.sharded_loss(root, 0).backward();
    reference.backward(0);
    const at::Tensor expected =
        part_of(reference.gradient(rank, 2, 0), root, 2, 0, rank / 2);
    EXPECT_TRUE(at::equal(root.shards_of(2)[0].grad().flatten(), expected));
  });
}

// ---- Checkpoints.

class UnitMeshFilesTest : public ::testing::Test {
 protected:
  void SetUp() override { std::filesystem::create_directories(base_); }
  void TearDown() override { std::filesystem::remove_all(base_); }
  std::string path(const std::string& name) const { return base_ / name; }

 private:
  const std::filesystem::path base_ =
      std::filesystem::path(::testing::TempDir()) /
      absl::StrCat("brigade_unit_mesh_", getpid());
};

void train_adam(Rank& rank, torch::optim::AdamW& optimizer, int from, int to) {
  for (int step = from; step < to; ++step) {
    optimizer.zero_grad();
    rank.backward(step);
    optimizer.step();
  }
}

TEST_F(UnitMeshFilesTest, ShardsOfAllMeshesAreSavedAndLoadedOnOthers) {
  const MoeLayout saved = {.num_shards = 2,
                           .experts = {{every_other}, {neighbours, 1}}};
  // In other parts, so that what is no whole number any more is added up in
  // another order.
  const MoeLayout other = {.experts = {{every_other, 1}, {neighbours}}};
  run_ranks(4, [&](const Group& group) {
    Rank rank(saved, group);
    torch::optim::AdamW optimizer(rank.root.shards(), 0.01);
    train_adam(rank, optimizer, 0, 3);
    save_checkpoint(path("checkpoint"), checkpoint_model(rank.root), optimizer);
    train_adam(rank, optimizer, 3, 5);
    for (const bool in_same_parts : {true, false}) {
      const MoeLayout& layout = in_same_parts ? saved : other;
      Rank again(layout, group);
      torch::optim::AdamW resumed(again.root.shards(), 0.01);
      load_checkpoint(path("checkpoint"), checkpoint_model(again.root),
                      resumed);
      train_adam(again, resumed, 3, 5);
      for (size_t unit = 0; unit < rank.root.num_units(); ++unit) {
        const auto expected = rank.root.gather_unit(unit);
        const auto found = again.root.gather_unit(unit);
        for (size_t i = 0; i < found.size(); ++i) {
          const double tolerance = in_same_parts ? 0 : 1e-12;
          EXPECT_TRUE(at::allclose(found[i], expected[i], tolerance, tolerance))
              << "unit " << unit << " parameter " << i;
        }
      }
    }
  });
}

// One rank has all experts, as units without meshes.
TEST_F(UnitMeshFilesTest, OneRankLoadsAllExperts) {
  Tensors whole;
  run_ranks(4, [&](const Group& group) {
    MoeReference reference(kExperts);
    Rank rank(kExperts, group);
    expect_trains(rank, reference, 0, 2);
    save_checkpoint(path("checkpoint"), checkpoint_model(rank.root));
    if (rank.rank == 0) whole = reference.tensors();
  });
  run_ranks(1, [&](const Group& group) {
    UnitSpec spec;
    for (const auto& [name, tensor] : whole) {
      spec.parameters.push_back(
          {.name = name,
           .tensor = torch::zeros_like(tensor.detach()).requires_grad_()});
    }
    ShardedRoot root({spec}, group, {});
    load_checkpoint(path("checkpoint"), checkpoint_model(root));
    size_t i = 0;
    for (const auto& [name, tensor] : whole) {
      EXPECT_TRUE(at::equal(root.shards()[i++].detach(), tensor)) << name;
    }
  });
}

TEST_F(UnitMeshFilesTest, OneFileHoldsTheTensorsOfAllMeshes) {
  run_ranks(4, [&](const Group& group) {
    MoeReference reference(kExperts);
    Rank rank(kExperts, group);
    expect_trains(rank, reference, 0, 2);
    save_checkpoint(path("whole.safetensors"), checkpoint_model(rank.root));
    Rank again(kExperts, group);
    load_checkpoint(path("whole.safetensors"), checkpoint_model(again.root));
    again.expect_wholes(reference);
  });
}

// ---- Drawn.

TEST(UnitMeshTest, AnyMeshesTrainAsOneProcessDoes) {
  for (uint64_t seed = 0; seed < 10; ++seed) {
    std::mt19937_64 draw(seed);
    const auto below = [&](uint64_t end) { return draw() % end; };
    MoeLayout layout;
    const std::vector<int> sizes = {2, 3, 4, 4, 6};
    const int num_ranks = layout.num_ranks = sizes[below(sizes.size())];
    const auto divisor_of = [&](int number) {
      int divisor = number;
      do {
        divisor = 1 + static_cast<int>(below(number));
      } while (number % divisor != 0);
      return divisor;
    };
    layout.num_shards = divisor_of(num_ranks);
    const size_t num_experts = 1 + below(3);
    for (size_t i = 0; i < num_experts; ++i) {
      const int size = divisor_of(num_ranks);
      std::vector<int> order;
      for (int r = 0; r < num_ranks; ++r) order.push_back(r / size);
      std::ranges::shuffle(order, draw);
      layout.experts.push_back({.group_of = [order](int r) { return order[r]; },
                                .num_shards = divisor_of(size)});
    }
    // By step, rank, unit.
    std::vector<std::vector<std::set<size_t>>> left_out(5);
    for (auto& of_step : left_out) {
      for (int r = 0; r < num_ranks; ++r) {
        auto& units = of_step.emplace_back();
        if (r == 0) continue;  // so that each is used by somebody
        for (size_t unit = 1; unit < 2 + num_experts; ++unit) {
          if (below(4) == 0) units.insert(unit);
        }
      }
    }
    const ShardingOptions options = {.reshards_after_forward = below(2) == 0,
                                     .prefetch_depth = below(3),
                                     .max_reducing = 1 + below(2)};
    SCOPED_TRACE(seed);
    run_ranks(num_ranks, [&](const Group& group) {
      MoeReference reference(layout);
      Rank rank(layout, group, options);
      expect_trains(rank, reference, 0, 5, [&](int step) {
        return [&left_out, step](int r) { return left_out[step][r]; };
      });
    });
  }
}

}  // namespace unit_mesh_test
}  // namespace brigade
