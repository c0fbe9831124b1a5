// In which order gathers and sums may wait for each other: by example, and that
// no ranks of random programs wait for each other for ever, on a model of their
// hosts and streams.

#include "brigade/fsdp/schedule/gather_waits.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <vector>

#include "brigade/fsdp/schedule/gather_schedule.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace gather_waits_test {

using ::testing::ElementsAre;

using Units = std::vector<size_t>;

std::vector<size_t> sums_before_all(const GatherWaits& waits, size_t count) {
  std::vector<size_t> before;
  for (size_t i = 0; i < count; ++i) before.push_back(waits.sums_before(i));
  return before;
}

Units chain(size_t num_units) {
  Units units(num_units);
  std::iota(units.rbegin(), units.rend(), size_t{0});
  return units;
}

TEST(GatherWaitsTest, AGatherIsBehindTheSumsWhoseMemoryIsLentAgain) {
  const GatherWaits waits(chain(4), chain(4), /*prefetch_depth=*/0,
                          /*max_reducing=*/2);
  EXPECT_THAT(sums_before_all(waits, 4), ElementsAre(0, 0, 1, 2));
  EXPECT_EQ(waits.sums_before(4), 2u) << "late ones are behind the last";
  EXPECT_EQ(waits.num_lendable(3), 2u);
  EXPECT_EQ(waits.num_lendable(4), std::numeric_limits<size_t>::max());
}

TEST(GatherWaitsTest, WhatIsLaunchedAheadIsBehindFewer) {
  const GatherWaits waits(chain(6), chain(6), /*prefetch_depth=*/2,
                          /*max_reducing=*/1);
  EXPECT_THAT(sums_before_all(waits, 6), ElementsAre(0, 0, 0, 1, 2, 3));
}

TEST(GatherWaitsTest, WithRoomForAllSumsGathersAreBehindNone) {
  const GatherWaits waits(chain(4), chain(4), 1, 4);
  EXPECT_THAT(sums_before_all(waits, 4), ElementsAre(0, 0, 0, 0));
}

// Its sum is launched when the last of its calls has had its backward.
TEST(GatherWaitsTest, AUnitThatIsGatheredTwiceIsSummedOnce) {
  const Units gathers = {2, 1, 2, 0};
  const Units sums = {1, 2, 0};
  const GatherWaits waits(gathers, sums, 1, 1);
  EXPECT_THAT(sums_before_all(waits, 4), ElementsAre(0, 0, 0, 1));
}

TEST(GatherWaitsTest, UnitsThatAreNotReducedHaveNoSums) {
  const Units gathers = {3, 2, 1, 0};
  const Units sums = {2, 0};
  const GatherWaits waits(gathers, sums, 0, 1);
  EXPECT_THAT(sums_before_all(waits, 4), ElementsAre(0, 0, 1, 1));
}

TEST(GatherWaitsTest, WithoutGathersAnythingMayBeWaitedFor) {
  const GatherWaits none;
  EXPECT_EQ(none.sums_before(0), 0u);
  EXPECT_EQ(none.num_lendable(0), std::numeric_limits<size_t>::max());
}

// ---- A model of ranks.

struct Settings {
  size_t num_units;
  size_t depth;
  size_t max_reducing;
  bool has_waits;  // false: as if there were no such order

  // Of all units, as ranks have agreed on it; and those that stay whole from
  // forward on.
  Units sums = chain(num_units);
  std::set<size_t> whole = {};

  // What a program names in place of the depth: the next expected one.
  bool names_ahead = false;

  Units gathers() const {
    Units gathered = chain(num_units);
    std::erase_if(gathered, [&](size_t unit) { return whole.contains(unit); });
    return gathered;
  }
};

// What a stream runs behind other things of this rank.
struct Step {
  std::vector<size_t> behind;         // steps
  std::optional<size_t> gather = {};  // all ranks', by place
  std::optional<size_t> sum = {};     // all ranks', by place
};

// A rank's backward, as its host launches it. Each computation is taken to use
// all memory that has been given back before, and each gather to get memory of
// the last computation.
class Rank {
 public:
  // `program`: units, each at most once.
  Rank(const Settings& settings, const Units& program)
      : settings_(settings),
        schedule_(settings.num_units, settings.depth),
        is_ready_(settings.num_units) {
    if (settings.has_waits) {
      waits_ = GatherWaits(settings.gathers(), settings.sums, settings.depth,
                           settings.max_reducing);
    }
    launch(schedule_.begin(settings.gathers()));
    std::set<size_t> to_come(program.begin(), program.end());
    for (const size_t unit : program) {
      if (settings.whole.contains(unit)) {
        acquire();
        ready(unit);
        continue;
      }
      const Units left_out = schedule_.left_out_by(unit);
      launch(schedule_.launch_through(unit));
      for (const size_t other : left_out) {
        if (!to_come.contains(other)) ready(other);
      }
      const size_t gather = schedule_.awaited_by(unit);
      if (sums_.size() < waits_.sums_before(gather)) {
        asks_ = true;
        return;
      }
      Units ahead;
      if (settings.names_ahead && unit > 0) ahead.push_back(unit - 1);
      launch(schedule_.needs(unit, ahead).launch);
      compute(gathers_[gather]);
      acquire();
      schedule_.released(unit);
      ready(unit);
    }
    launch(schedule_.rest());
    for (const size_t unit : settings.sums) {
      if (!is_ready_[unit]) ready(unit);
    }
  }

  bool asks() const { return asks_; }
  const std::vector<Step>& steps() const { return steps_; }
  size_t most_reducing() const { return most_reducing_; }

 private:
  size_t add(Step step, std::optional<size_t>& stream) {
    if (stream) step.behind.push_back(*stream);
    steps_.push_back(std::move(step));
    return *(stream = steps_.size() - 1);
  }

  std::vector<size_t> behind(const std::optional<size_t>& stream) const {
    return stream ? std::vector<size_t>{*stream} : std::vector<size_t>();
  }

  void launch(const Units& units) {
    for (size_t i = 0; i < units.size(); ++i) {
      gathers_.push_back(
          add({.behind = behind(compute_), .gather = gathers_.size()},
              gather_stream_));
    }
  }

  void compute(size_t step) { add({.behind = {step}}, compute_); }

  // Memory for gradients, perhaps of sums that are launched.
  void acquire() {
    const size_t lendable = waits_.num_lendable(gathers_.size());
    while (sums_.size() - num_lent_ > settings_.max_reducing - 1 &&
           num_lent_ < lendable) {
      compute(sums_[num_lent_++]);
    }
    most_reducing_ = std::max(most_reducing_, sums_.size() - num_lent_ + 1);
  }

  void ready(size_t unit) {
    is_ready_[unit] = 1;
    const Units& order = settings_.sums;
    while (sums_.size() < order.size() && is_ready_[order[sums_.size()]]) {
      sums_.push_back(
          add({.behind = behind(compute_), .sum = sums_.size()}, sum_stream_));
    }
  }

  const Settings settings_;
  GatherSchedule schedule_;
  GatherWaits waits_;
  std::vector<char> is_ready_;
  std::vector<Step> steps_;
  std::optional<size_t> compute_, gather_stream_, sum_stream_;  // last steps
  std::vector<size_t> gathers_, sums_;  // steps, by place
  size_t num_lent_ = 0;                 // of the sums
  size_t most_reducing_ = 0;
  bool asks_ = false;
};

// Runs what can be run, a collective where all ranks can, until nothing can.
bool all_ends(const std::vector<Rank>& ranks) {
  std::vector<std::vector<char>> is_done;
  for (const Rank& rank : ranks) is_done.emplace_back(rank.steps().size());
  const auto can_run = [&](size_t rank, size_t step) {
    return std::ranges::all_of(
        ranks[rank].steps()[step].behind,
        [&](size_t other) { return is_done[rank][other] != 0; });
  };
  const auto collective_can_run = [&](const Step& step) {
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      const auto& steps = ranks[rank].steps();
      const auto own = std::ranges::find_if(steps, [&](const Step& other) {
        return (step.gather && other.gather == step.gather) ||
               (step.sum && other.sum == step.sum);
      });
      if (!can_run(rank, static_cast<size_t>(own - steps.begin()))) {
        return false;
      }
    }
    return true;
  };
  for (bool goes_on = true; goes_on;) {
    goes_on = false;
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      for (size_t i = 0; i < is_done[rank].size(); ++i) {
        const Step& step = ranks[rank].steps()[i];
        if (is_done[rank][i] || !can_run(rank, i)) continue;
        if ((step.gather || step.sum) && !collective_can_run(step)) continue;
        is_done[rank][i] = 1;
        goes_on = true;
      }
    }
  }
  return std::ranges::all_of(is_done, [](const std::vector<char>& of_rank) {
    return std::ranges::all_of(of_rank, [](char done) { return done != 0; });
  });
}

// Some units left out, and some later than expected.
Units draw_program(size_t num_units, std::mt19937& random) {
  Units program;
  for (const size_t unit : chain(num_units)) {
    if (random() % 4 != 0) program.push_back(unit);
  }
  const size_t num_swaps = random() % 3;
  for (size_t i = 0; i < num_swaps && program.size() > 1; ++i) {
    std::swap(program[random() % program.size()],
              program[random() % program.size()]);
  }
  return program;
}

struct Counts {
  int ended = 0;
  int asked = 0;  // some rank does, and all hear of it
  int stuck = 0;
};

Counts run_random_programs(bool has_waits) {
  Counts counts;
  std::mt19937 random(7);
  for (int i = 0; i < 4000; ++i) {
    Settings settings = {.num_units = 1 + random() % 8,
                         .depth = random() % 3,
                         .max_reducing = 1 + random() % 3,
                         .has_waits = has_waits};
    for (size_t k = random() % 3; k-- > 0;) {
      std::swap(settings.sums[random() % settings.num_units],
                settings.sums[random() % settings.num_units]);
      settings.whole.insert(random() % settings.num_units);
    }
    settings.names_ahead = random() % 2 != 0;
    std::vector<Rank> ranks;
    const size_t num_ranks = 2 + random() % 2;
    while (ranks.size() < num_ranks) {
      ranks.emplace_back(settings, draw_program(settings.num_units, random));
    }
    if (std::ranges::any_of(ranks, &Rank::asks)) {
      ++counts.asked;
    } else {
      ++(all_ends(ranks) ? counts.ended : counts.stuck);
    }
  }
  return counts;
}

TEST(GatherWaitsTest, NoRanksWaitForEachOtherForEver) {
  const Counts counts = run_random_programs(/*has_waits=*/true);
  EXPECT_EQ(counts.stuck, 0);
  EXPECT_GT(counts.ended, 2000);
  EXPECT_GT(counts.asked, 100);
}

TEST(GatherWaitsTest, WithoutThatOrderSomeWould) {
  const Counts counts = run_random_programs(/*has_waits=*/false);
  EXPECT_EQ(counts.asked, 0);
  EXPECT_GT(counts.stuck, 100);
}

// It never asks, and takes no more memory.
TEST(GatherWaitsTest, ARankThatDoesWhatIsExpectedGoesOn) {
  for (size_t num_units = 1; num_units < 9; ++num_units) {
    for (size_t depth = 0; depth < 4; ++depth) {
      for (size_t max_reducing = 1; max_reducing < 4; ++max_reducing) {
        const Settings settings = {.num_units = num_units,
                                   .depth = depth,
                                   .max_reducing = max_reducing,
                                   .has_waits = true};
        const Rank rank(settings, chain(num_units));
        EXPECT_FALSE(rank.asks());
        EXPECT_LE(rank.most_reducing(), max_reducing)
            << num_units << " units, depth " << depth;
        EXPECT_TRUE(all_ends({rank, rank}));
      }
    }
  }
}

// What it leaves out is not waited for where its turn is over.
TEST(GatherWaitsTest, ARankThatLeavesUnitsOutGoesOn) {
  std::mt19937 random(3);
  for (int i = 0; i < 500; ++i) {
    const Settings settings = {.num_units = 8,
                               .depth = random() % 3,
                               .max_reducing = 1 + random() % 3,
                               .has_waits = true};
    Units program;
    for (const size_t unit : chain(settings.num_units)) {
      if (random() % 2 != 0) program.push_back(unit);
    }
    const Rank other(settings, program);
    ASSERT_FALSE(other.asks());
    EXPECT_TRUE(all_ends({Rank(settings, chain(8)), other}));
  }
}

}  // namespace gather_waits_test
}  // namespace brigade
