// Ranks that use different units, or in a different order, on devices:
// gradients of one process, or the same error on all ranks.

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/comm/errors/error_texts.h"
#include "brigade/fsdp/segmented_model.h"
#include "brigade/tests/simulated_device/host_backend.h"
#include "brigade/tests/support/simulated_device/stream_test.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace ranks_differ_streams_test {

using ::testing::Each;
using ::testing::HasSubstr;
using testing::run_ranks_on_devices;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Units = std::vector<size_t>;
using Programs = std::vector<Units>;  // by rank

constexpr size_t kNumUnits = 8;  // inside the root unit
constexpr int64_t kWidth = 3;

// Integers, so that sums are exact.
at::Tensor weight_of(size_t unit) {
  return at::arange(1, kWidth + 1, at::kFloat)
      .remainder(static_cast<double>(unit % 3 + 1))
      .add_(1);
}

// A multiple of the world size, so that means are exact.
at::Tensor input_of(int rank, int world_size, int step) {
  return at::full({kWidth}, world_size * (1 + rank + step % 2), at::kFloat);
}

// Returns the mean over ranks of one process's gradients, by unit; undefined if
// no rank uses the unit.
std::vector<at::Tensor> expected_gradients(const Programs& by_rank, int step) {
  std::vector<at::Tensor> weights;
  for (size_t unit = 0; unit <= kNumUnits; ++unit) {
    weights.push_back(weight_of(unit).requires_grad_());
  }
  const int world_size = static_cast<int>(by_rank.size());
  for (int rank = 0; rank < world_size; ++rank) {
    at::Tensor h = input_of(rank, world_size, step);
    for (const size_t unit : by_rank[rank]) h = h * weights[unit];
    (h * weights[0]).sum().backward();
  }
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& weight : weights) {
    gradients.push_back(weight.grad().defined() ? weight.grad() / world_size
                                                : at::Tensor());
  }
  return gradients;
}

class Model {
 public:
  Model(const Group& group, const FullyShardOptions& options)
      : rank_(group->getRank()), world_size_(group->getSize()) {
    std::vector<UnitRequest> units;
    for (size_t unit = 0; unit <= kNumUnits; ++unit) {
      weights_.push_back(
          weight_of(unit).to(simulated::device(rank_)).requires_grad_());
      UnitRequest& request = units.emplace_back();
      request.name = unit == 0 ? "" : absl::StrCat("u", unit);
      if (unit > 0) request.parent = 0;
      request.parameters = {{absl::StrCat("w", unit), weights_.back()}};
    }
    sharded_ = std::make_unique<SegmentedModel>(
        make_sharded_units(units, group, options), group, options);
  }

  // `failing`: index in the program at which this rank throws.
  void step(const Units& program, int step, size_t failing = kNumUnits) {
    for (const at::Tensor& weight : weights_) weight.mutable_grad().reset();
    const at::Tensor x =
        input_of(rank_, world_size_, step).to(simulated::device(rank_));
    sharded_
        ->forward([&] {
          at::Tensor h = x;
          for (size_t i = 0; i < program.size(); ++i) {
            if (i == failing) throw std::runtime_error("bad input");
            h = h * weights_[program[i]];
          }
          return h * weights_[0];
        })
        .sum()
        .backward();
  }

  void expect_gradients(const Programs& by_rank, int step) const {
    const std::vector<at::Tensor> expected = expected_gradients(by_rank, step);
    for (size_t unit = 0; unit <= kNumUnits; ++unit) {
      const at::Tensor found = weights_[unit].grad();
      ASSERT_EQ(found.defined(), expected[unit].defined())
          << "rank " << rank_ << ", step " << step << ", unit " << unit;
      if (!found.defined()) continue;
      const Shard& shard = *shard_of(found);
      const at::Tensor own = shard.local.cpu();
      EXPECT_TRUE(
          at::equal(own, expected[unit].narrow(0, shard.offset, own.numel())))
          << "rank " << rank_ << ", step " << step << ", unit " << unit << ": "
          << own << " of " << expected[unit];
    }
  }

  SegmentedModel& sharded() { return *sharded_; }

 private:
  const int rank_;
  const int world_size_;
  std::vector<at::Tensor> weights_;
  std::unique_ptr<SegmentedModel> sharded_;
};

Units all_units() {
  Units units(kNumUnits);
  std::iota(units.begin(), units.end(), size_t{1});
  return units;
}

// Returns each unit with a chance of 1/2, in order.
Units some_units(std::mt19937& random) {
  Units units;
  for (const size_t unit : all_units()) {
    if (random() % 2 != 0) units.push_back(unit);
  }
  return units;
}

// World size, prefetch_depth, max_reducing.
class RanksDifferStreamsTest
    : public simulated::StreamTest,
      public ::testing::WithParamInterface<std::tuple<int, size_t, size_t>> {
 protected:
  static int world_size() { return std::get<0>(GetParam()); }
  static FullyShardOptions options() {
    return {.prefetch_depth = std::get<1>(GetParam())};
  }
  // `programs`: by step.
  static void expect_one_process(const std::vector<Programs>& programs,
                                 const FullyShardOptions& options) {
    run_ranks_on_devices(world_size(), [&](const Group& group, int rank) {
      Model model(group, options);
      model.sharded().set_max_reducing(std::get<2>(GetParam()));
      for (size_t step = 0; step < programs.size(); ++step) {
        model.step(programs[step][rank], static_cast<int>(step));
        model.expect_gradients(programs[step], static_cast<int>(step));
      }
    });
  }

  // Returns the error of each rank in or after a step in which ranks differ,
  // which follows identical steps.
  static std::vector<std::string> errors_of(const Programs& by_rank,
                                            size_t failing = kNumUnits) {
    std::vector<std::string> errors(world_size());
    run_ranks_on_devices(world_size(), [&](const Group& group, int rank) {
      Model model(group, options());
      model.sharded().set_max_reducing(std::get<2>(GetParam()));
      const Programs alike(world_size(), all_units());
      for (int step = 0; step < 3; ++step) {
        model.step(alike[rank], step);
        model.expect_gradients(alike, step);
      }
      try {
        model.step(by_rank[rank], 3, rank == 0 ? failing : kNumUnits);
        for (int step = 4; step < 7; ++step) model.step(alike[rank], step);
      } catch (const std::exception&) {
        errors[rank] = message_of(std::current_exception());
      }
      // After an exception ranks can continue if none has begun the next step.
      if (failing == kNumUnits) {
        EXPECT_FALSE(model.sharded().can_continue());
      }
    });
    return errors;
  }
};

// The first step records a schedule of all units.
TEST_P(RanksDifferStreamsTest, EachRankSkipsAnyUnits) {
  std::mt19937 random(5);
  std::vector<Programs> programs = {Programs(world_size(), all_units())};
  for (int step = 1; step < 6; ++step) {
    Programs& by_rank = programs.emplace_back();
    for (int rank = 0; rank < world_size(); ++rank) {
      by_rank.push_back(some_units(random));
    }
  }
  expect_one_process(programs, options());
}

TEST_P(RanksDifferStreamsTest, AnyOrderWorksIfStatusesAreAwaited) {
  std::mt19937 random(7);
  std::vector<Programs> programs;
  for (int step = 0; step < 6; ++step) {
    Programs& by_rank = programs.emplace_back();
    for (int rank = 0; rank < world_size(); ++rank) {
      Units& units = by_rank.emplace_back(some_units(random));
      std::ranges::shuffle(units, random);
    }
  }
  FullyShardOptions awaits = options();
  awaits.max_unconfirmed_iterations = 0;
  expect_one_process(programs, awaits);
}

TEST_P(RanksDifferStreamsTest, AllRanksChangeTheOrder) {
  std::vector<Programs> programs;
  std::mt19937 random(11);
  for (int step = 0; step < 5; ++step) {
    Units order = all_units();
    std::ranges::shuffle(order, random);
    programs.emplace_back(world_size(), order);
    programs.emplace_back(world_size(), order);
  }
  expect_one_process(programs, options());
}

TEST_P(RanksDifferStreamsTest, TheOppositeOrderIsAnErrorOnAllRanks) {
  if (world_size() != 3) GTEST_SKIP() << "closing groups takes long here";
  Programs by_rank(world_size(), all_units());
  std::ranges::reverse(by_rank.back());
  const std::vector<std::string> errors = errors_of(by_rank);
  EXPECT_THAT(errors, Each(HasSubstr("in another order than recorded")));
  EXPECT_THAT(errors, Each(HasSubstr("max_unconfirmed_iterations = 0")));
}

TEST_P(RanksDifferStreamsTest, AFailureIsTheSameErrorOnAllRanks) {
  if (world_size() != 3) GTEST_SKIP() << "closing groups takes long here";
  EXPECT_THAT(errors_of(Programs(world_size(), all_units()), /*failing=*/3),
              Each(HasSubstr("bad input")));
}

INSTANTIATE_TEST_SUITE_P(, RanksDifferStreamsTest,
                         ::testing::Values(std::tuple(2, 1, 2),
                                           std::tuple(3, 2, 1),
                                           std::tuple(4, 0, 2)));

}  // namespace ranks_differ_streams_test
}  // namespace brigade
