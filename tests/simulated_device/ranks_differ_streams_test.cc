// Ranks whose backwards use other units, or in another order, on devices: the
// gradients of one process, or the same error on all ranks.

#include <torch/torch.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/comm/errors/message_of.h"
#include "brigade/fsdp/sharded_root.h"
#include "brigade/tests/simulated_device/host_backend.h"
#include "brigade/tests/support/simulated_device/stream_test.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace ranks_differ_streams_test {

using simulated::on_device;
using ::testing::Each;
using ::testing::HasSubstr;
using testing::run_ranks_on_devices;
using testing::Waiting;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Units = std::vector<size_t>;

constexpr size_t kNumUnits = 8;  // around which the outermost one is
constexpr int64_t kWidth = 3;

// Integers, so that sums are exact.
at::Tensor weight_of(size_t unit) {
  return at::arange(1, kWidth + 1, at::kFloat)
      .remainder(static_cast<double>(unit % 3 + 1))
      .add_(1);
}

// A multiple of how many ranks there are, so that means are exact, too.
at::Tensor input_of(int rank, int world_size, int step) {
  return at::full({kWidth}, world_size * (1 + rank + step % 2), at::kFloat);
}

// Of one process: what ranks' backwards give, by unit; undefined where no rank
// uses it.
class Reference {
 public:
  Reference() {
    for (size_t unit = 0; unit <= kNumUnits; ++unit) {
      weights_.push_back(weight_of(unit).requires_grad_());
    }
  }

  void add(const std::vector<Units>& by_rank, int step) {
    world_size_ = static_cast<int>(by_rank.size());
    for (int rank = 0; rank < world_size_; ++rank) {
      at::Tensor h = input_of(rank, world_size_, step);
      for (const size_t unit : by_rank[rank]) h = h * weights_[unit];
      (h * weights_[0]).sum().backward();
    }
  }

  // The mean over ranks of what was added since the last time.
  std::vector<at::Tensor> take_gradients() {
    std::vector<at::Tensor> gradients;
    for (at::Tensor& weight : weights_) {
      gradients.push_back(weight.grad().defined() ? weight.grad() / world_size_
                                                  : at::Tensor());
      weight.mutable_grad() = at::Tensor();
    }
    return gradients;
  }

 private:
  int world_size_ = 0;
  std::vector<at::Tensor> weights_;
};

std::vector<at::Tensor> expected_gradients(const std::vector<Units>& by_rank,
                                           int step) {
  Reference reference;
  reference.add(by_rank, step);
  return reference.take_gradients();
}

// Powers of two: products are exact.
at::Tensor weight_of_expert(size_t unit, size_t expert) {
  return at::full({kWidth}, 1 + static_cast<int64_t>((unit + expert) % 2),
                  at::kFloat);
}

class Model {
 public:
  Model(const Group& group, const ShardingOptions& options)
      : rank_(group->getRank()), world_size_(group->getSize()) {
    std::vector<UnitSpec> units;
    for (size_t unit = 0; unit <= kNumUnits; ++unit) {
      weights_.push_back(
          weight_of(unit).to(simulated::device(rank_)).requires_grad_());
      units.push_back(
          {.name = unit == 0 ? "" : absl::StrCat("u", unit),
           .parameters = {{absl::StrCat("w", unit), weights_.back()}}});
    }
    units[0].reshards_after_forward = false;
    root_ = std::make_unique<ShardedRoot>(units, group, options);
  }

  // `failing`: where the program throws; past its end: nowhere.
  at::Tensor forward(const Units& program, int step,
                     size_t failing = kNumUnits) {
    const at::Tensor x =
        input_of(rank_, world_size_, step).to(simulated::device(rank_));
    return root_->forward([&] {
      return root_->call(0, x, [&](at::Tensor h) {
        for (size_t i = 0; i < program.size(); ++i) {
          h = root_->call(program[i], h, [&](const at::Tensor& in) {
            if (i == failing) throw std::runtime_error("bad input");
            return in * weights_[program[i]];
          });
        }
        return h * weights_[0];
      });
    });
  }

  void step(const Units& program, int step) {
    zero_grad();
    forward(program, step).sum().backward();
  }

  void zero_grad() {
    for (at::Tensor shard : root_->shards()) {
      shard.mutable_grad() = at::Tensor();
    }
  }

  void expect_gradients(const std::vector<at::Tensor>& expected,
                        int step) const {
    for (size_t unit = 0; unit <= kNumUnits; ++unit) {
      const at::Tensor found = root_->shards_of(unit)[0].grad();
      ASSERT_EQ(found.defined(), expected[unit].defined())
          << "rank " << rank_ << ", step " << step << ", unit " << unit;
      if (!found.defined()) continue;
      const Segment& segment = *root_->unit(unit).segments[0];
      const ShardRange range = segment.layout().range(0, segment.rank());
      EXPECT_TRUE(
          at::equal(found.cpu(),
                    expected[unit].narrow(0, range.in_parameter, range.numel)))
          << "rank " << rank_ << ", step " << step << ", unit " << unit << ": "
          << found.cpu() << " of " << expected[unit];
    }
  }

  void expect_gradients(const std::vector<Units>& by_rank, int step) const {
    expect_gradients(expected_gradients(by_rank, step), step);
  }

  ShardedRoot& root() { return *root_; }

 private:
  const int rank_;
  const int world_size_;
  std::vector<at::Tensor> weights_;
  std::unique_ptr<ShardedRoot> root_;
};

Units all_units() {
  Units units(kNumUnits);
  std::iota(units.begin(), units.end(), size_t{1});
  return units;
}

// By world size, depth, sums that may be in flight.
class RanksDifferStreamsTest
    : public simulated::StreamTest,
      public ::testing::WithParamInterface<std::tuple<int, size_t, size_t>> {
 protected:
  static int world_size() { return std::get<0>(GetParam()); }
  static ShardingOptions options() {
    return {.prefetch_depth = std::get<1>(GetParam()),
            .max_reducing = std::get<2>(GetParam()),
            .failure_patience = std::chrono::seconds(10)};
  }

  // `programs`: by step, by rank.
  static void expect_one_process(
      const std::vector<std::vector<Units>>& programs) {
    run_ranks_on_devices(
        world_size(),
        [&](const Group& group, int rank) {
          Model model(group, options());
          for (size_t step = 0; step < programs.size(); ++step) {
            model.step(programs[step][rank], static_cast<int>(step));
            model.expect_gradients(programs[step], static_cast<int>(step));
          }
        },
        Waiting::kApart);
  }

  // A step in which ranks differ, between steps in which they don't: what each
  // rank was told, in it or in the next.
  static std::vector<std::string> errors_of(const std::vector<Units>& by_rank) {
    std::vector<std::string> errors(world_size());
    run_ranks_on_devices(
        world_size(),
        [&](const Group& group, int rank) {
          Model model(group, options());
          const std::vector<Units> alike(world_size(), all_units());
          for (int step = 0; step < 3; ++step) {
            model.step(alike[rank], step);
            model.expect_gradients(alike, step);
          }
          try {
            model.step(by_rank[rank], 3);
            model.step(alike[rank], 4);  // where some are told of it
            model.expect_gradients(alike, 4);
            return;
          } catch (const std::exception&) {
            errors[rank] = message_of(std::current_exception());
          }
          EXPECT_FALSE(model.root().can_continue());
        },
        Waiting::kApart);
    return errors;
  }
};

TEST_P(RanksDifferStreamsTest, EachLeavesOutWhatItLikes) {
  std::mt19937 random(5);
  std::vector<std::vector<Units>> programs;
  for (int step = 0; step < 6; ++step) {
    std::vector<Units>& by_rank = programs.emplace_back();
    for (int rank = 0; rank < world_size(); ++rank) {
      Units& units = by_rank.emplace_back();
      for (const size_t unit : all_units()) {
        if (random() % 2 != 0) units.push_back(unit);
      }
    }
  }
  expect_one_process(programs);
}

// All but one do what was expected.
TEST_P(RanksDifferStreamsTest, OneLeavesOutAllButTheLast) {
  std::vector<Units> by_rank(world_size(), all_units());
  const std::vector<Units> alike = by_rank;
  by_rank.back() = {1};
  std::vector<Units> other = alike;
  other.front() = {kNumUnits};
  expect_one_process({alike, by_rank, alike, other, alike});
}

// As experts of which some have no token: all ranks call each unit, and only
// rank 0 uses all of it. Sums do not wait for the end of the others' backward.
TEST_P(RanksDifferStreamsTest, MostUseAPartOfEveryUnit) {
  run_ranks_on_devices(
      world_size(),
      [](const Group& group, int rank) {
        std::vector<at::Tensor> weights;
        std::vector<UnitSpec> units;
        for (size_t unit = 0; unit < kNumUnits; ++unit) {
          UnitSpec& spec =
              units.emplace_back(UnitSpec{.name = absl::StrCat("u", unit)});
          for (int expert = 0; expert < 2; ++expert) {
            weights.push_back(weight_of_expert(unit, expert)
                                  .to(simulated::device(rank))
                                  .requires_grad_());
            spec.parameters.push_back(
                {absl::StrCat("w", unit, ".", expert), weights.back()});
          }
        }
        ShardedRoot root(units, group, options());
        for (int step = 0; step < 3; ++step) {
          for (at::Tensor shard : root.shards()) {
            shard.mutable_grad() = at::Tensor();
          }
          const at::Tensor x = input_of(rank, world_size(), step)
                                   .to(simulated::device(rank))
                                   .requires_grad_();
          const auto run = [&](const std::vector<at::Tensor>& of, int r,
                               size_t unit, const at::Tensor& in) {
            const size_t used = (r + unit + step) % 2;
            const at::Tensor out = in * of[2 * unit + used];
            return r == 0 ? out * of[2 * unit + 1 - used] : out;
          };
          root.forward([&] {
                at::Tensor h = x;
                for (size_t unit = 0; unit < kNumUnits; ++unit) {
                  h = root.call(unit, h, [&](const at::Tensor& in) {
                    return run(weights, rank, unit, in);
                  });
                }
                return h;
              })
              .sum()
              .backward();
          std::vector<at::Tensor> expected;
          for (size_t i = 0; i < weights.size(); ++i) {
            expected.push_back(weight_of_expert(i / 2, i % 2).requires_grad_());
          }
          for (int r = 0; r < world_size(); ++r) {
            at::Tensor h = input_of(r, world_size(), step);
            for (size_t unit = 0; unit < kNumUnits; ++unit) {
              h = run(expected, r, unit, h);
            }
            h.sum().backward();
          }
          for (size_t i = 0; i < weights.size(); ++i) {
            const Segment& segment = *root.unit(i / 2).segments[0];
            const ShardRange range =
                segment.layout().range(i % 2, segment.rank());
            const at::Tensor mean =
                expected[i].grad().narrow(0, range.in_parameter, range.numel) /
                world_size();
            EXPECT_TRUE(
                at::equal(root.shards_of(i / 2)[i % 2].grad().cpu(), mean))
                << "rank " << rank << ", step " << step << ", weight " << i;
          }
        }
      },
      Waiting::kApart);
}

// A head that stays whole until backward is one of those, too.
TEST_P(RanksDifferStreamsTest, OneLeavesOutAUnitThatStaysWhole) {
  std::vector<Units> by_rank(world_size(), all_units());
  const std::vector<Units> alike = by_rank;
  by_rank.back().erase(by_rank.back().begin() + kNumUnits - 2);
  run_ranks_on_devices(
      world_size(),
      [&](const Group& group, int rank) {
        Model model(group, options());
        model.root().settings(kNumUnits - 1).reshards_after_forward = false;
        int step = 0;
        for (const auto& programs : {alike, by_rank, alike, by_rank}) {
          model.step(programs[rank], step);
          model.expect_gradients(programs, step++);
        }
      },
      Waiting::kApart);
}

TEST_P(RanksDifferStreamsTest, AllTakeAnotherOrder) {
  std::vector<std::vector<Units>> programs;
  std::mt19937 random(11);
  for (int step = 0; step < 5; ++step) {
    Units order = all_units();
    std::ranges::shuffle(order, random);
    programs.emplace_back(world_size(), order);
  }
  expect_one_process(programs);
}

// Backward gathers as its own forward went, whatever order the sums keep to.
TEST_P(RanksDifferStreamsTest, AllTakeAnotherOrderInEachStep) {
  run_ranks_on_devices(
      world_size(),
      [&](const Group& group, int rank) {
        Model model(group, options());
        Units program = all_units();
        for (int step = 0; step < 6; ++step) {
          std::ranges::rotate(program, program.begin() + 2);
          if (step % 2 == 1) std::ranges::reverse(program);
          const std::vector<Units> alike(world_size(), program);
          model.zero_grad();
          const at::Tensor loss = model.forward(program, step).sum();
          const int64_t late = model.root().statistics().late_gathers;
          loss.backward();
          EXPECT_EQ(model.root().statistics().late_gathers, late);
          model.expect_gradients(alike, step);
        }
      },
      Waiting::kApart);
}

TEST_P(RanksDifferStreamsTest, NeighboursChangePlaces) {
  const auto [num_ranks, depth, max_reducing] = GetParam();
  if (depth + max_reducing < 2) GTEST_SKIP() << "too far out of turn";
  std::vector<Units> by_rank(num_ranks, all_units());
  const std::vector<Units> alike = by_rank;
  std::swap(by_rank.back()[2], by_rank.back()[3]);
  expect_one_process({alike, by_rank, by_rank, alike});
}

// The rank whose first is everybody's last is told where it needs it, and the
// others where they begin again.
TEST_P(RanksDifferStreamsTest, TheOppositeOrderIsAnErrorOnAllRanks) {
  std::vector<Units> by_rank(world_size(), all_units());
  std::ranges::reverse(by_rank.back());
  const std::vector<std::string> errors = errors_of(by_rank);
  EXPECT_THAT(errors, Each(HasSubstr(absl::StrCat("rank ", world_size() - 1,
                                                  " needed unit 'u"))));
  EXPECT_THAT(errors, Each(HasSubstr("max_reducing")));
}

// As many sums as there are: none is waited for.
TEST_P(RanksDifferStreamsTest, WithRoomForAllSumsAnyOrderGoes) {
  std::vector<Units> by_rank(world_size(), all_units());
  const std::vector<Units> alike = by_rank;
  std::ranges::reverse(by_rank.back());
  run_ranks_on_devices(
      world_size(),
      [&](const Group& group, int rank) {
        ShardingOptions roomy = options();
        roomy.max_reducing = kNumUnits + 1;
        Model model(group, roomy);
        int step = 0;
        for (const auto& programs : {alike, by_rank, by_rank, alike}) {
          model.step(programs[rank], step);
          model.expect_gradients(programs, step++);
        }
      },
      Waiting::kApart);
}

// ---- Random programs.

enum class Kind {
  kStep,
  kAddUp,      // a backward that is not reduced
  kEvaluate,   // without a graph, each rank as it likes
  kDropGraph,  // a forward whose backward never comes
  kFail,       // one rank, in forward: the group may be closed then
  kClip,
};

struct Operation {
  Kind kind;
  std::vector<Units> by_rank;
  int failing_rank;
  size_t failing_at;
};

// In one order on all ranks, of which each leaves out what it likes.
std::vector<Operation> draw_program(int world_size, std::mt19937& random) {
  std::vector<Operation> program;
  for (int i = 0; i < 12; ++i) {
    Operation& drawn = program.emplace_back();
    drawn.kind =
        random() % 2 == 0 ? Kind::kStep : Kind{static_cast<int>(random() % 6)};
    for (int rank = 0; rank < world_size; ++rank) {
      Units& units = drawn.by_rank.emplace_back();
      for (const size_t unit : all_units()) {
        if (random() % 4 != 0) units.push_back(unit);
      }
    }
    drawn.failing_rank = static_cast<int>(random() % world_size);
    const size_t num_calls = drawn.by_rank[drawn.failing_rank].size();
    drawn.failing_at = num_calls == 0 ? 0 : random() % num_calls;
    if (num_calls == 0 && drawn.kind == Kind::kFail) drawn.kind = Kind::kStep;
  }
  return program;
}

void run_program(Model& model, const std::vector<Operation>& program,
                 int rank) {
  Reference reference;
  int step = 0;
  for (const Operation& operation : program) {
    const Units& units = operation.by_rank[rank];
    switch (operation.kind) {
      case Kind::kStep:
        model.step(units, ++step);
        reference.add(operation.by_rank, step);
        model.expect_gradients(reference.take_gradients(), step);
        break;
      case Kind::kAddUp:
        model.root().set_synchronizes(false);
        model.forward(units, ++step).sum().backward();
        model.root().set_synchronizes(true);
        reference.add(operation.by_rank, step);
        break;
      case Kind::kEvaluate: {
        const at::NoGradGuard no_grad;
        model.forward(units, step);
        break;
      }
      case Kind::kDropGraph:
        model.forward(units, step);
        break;
      case Kind::kFail:
        EXPECT_THROW(
            model
                .forward(units, step,
                         rank == operation.failing_rank ? operation.failing_at
                                                        : kNumUnits)
                .sum()
                .backward(),
            std::exception);
        if (!model.root().can_continue()) return;
        reference.take_gradients();  // what was added up is lost with it
        break;
      case Kind::kClip:
        EXPECT_GE(model.root().clip_grad_norm(1e9), 0);
        break;
    }
  }
}

TEST_P(RanksDifferStreamsTest, RandomPrograms) {
  for (unsigned seed = 1; seed <= 4; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const std::vector<Operation> program = draw_program(world_size(), random);
    run_ranks_on_devices(
        world_size(),
        [&](const Group& group, int rank) {
          Model model(group, options());
          run_program(model, program, rank);
        },
        Waiting::kApart);
  }
}

INSTANTIATE_TEST_SUITE_P(, RanksDifferStreamsTest,
                         ::testing::Values(std::tuple(2, 1, 2),
                                           std::tuple(2, 0, 1),
                                           std::tuple(3, 2, 1),
                                           std::tuple(4, 1, 2)));

}  // namespace ranks_differ_streams_test
}  // namespace brigade
