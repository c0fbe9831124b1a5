// Simulation of n ranks in one process, each with a program and a
// SegmentCursor. A rank advances until it waits for a round or for an
// all-gather that not all ranks have issued. Every run checks: no deadlock, one
// sequence on all ranks, used units are unsharded, and each gradient is in
// exactly one reduce-scatter.

#include "brigade/fsdp/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <utility>

namespace brigade {
namespace schedule_test {

using Kind = ScheduleEntry::Kind;

struct Event {
  enum class Kind { kUse, kAccumulate, kFail };

  Kind kind = Kind::kUse;
  std::vector<size_t> units = {};
};

using Program = std::vector<Event>;

Event use(std::vector<size_t> units) { return {.units = std::move(units)}; }
Event accumulate(size_t unit) {
  return {.kind = Event::Kind::kAccumulate, .units = {unit}};
}
Event fail() { return {.kind = Event::Kind::kFail}; }

Program uses(const std::vector<size_t>& units) {
  Program program;
  for (const size_t unit : units) program.push_back(use({unit}));
  return program;
}

// Each unit is used, then gets its gradient.
Program backward(const std::vector<size_t>& units) {
  Program program;
  for (const size_t unit : units) {
    program.push_back(use({unit}));
    program.push_back(accumulate(unit));
  }
  return program;
}

UnitRules flat_rules(size_t num_units) {
  UnitRules rules;
  rules.parents.resize(num_units);
  return rules;
}

struct Rank {
  enum class State { kRuns, kWaits, kInRound, kOver };

  SegmentCursor cursor;
  Program program;
  State state = State::kRuns;
  size_t next = 0;     // event of the program
  size_t awaited = 0;  // place of an all-gather
  std::optional<size_t> missing = {};
  // By unit: place of the all-gather that it holds.
  std::vector<std::optional<size_t>> memory = {};
  Schedule issued = {};
  std::vector<int64_t> pending = {};  // gradients, by unit
  std::vector<int64_t> accumulated = {};
  std::vector<std::pair<size_t, int64_t>> reduced = {};
  size_t num_held = 0;
  size_t max_held = 0;
};

struct Outcome {
  RoundResult result = RoundResult::kContinues;
  Schedule issued;
  std::vector<size_t> num_rounds;
  std::vector<size_t> max_held;
  std::vector<RecordedSchedule> records;
  std::vector<bool> has_deviated;
  std::string error;
};

class Model {
 public:
  Model(const UnitRules& rules, const std::vector<Program>& programs,
        const std::vector<RecordedSchedule>& recorded, uint32_t seed,
        const std::vector<char>& unsharded = {}, bool expects = true)
      : num_units_(rules.num_units()),
        prefetch_depth_(rules.prefetch_depth),
        random_(seed) {
    for (size_t r = 0; r < programs.size(); ++r) {
      std::vector<uint32_t> expected(num_units_, 0);
      for (const Event& event : programs[r]) {
        if (expects && event.kind == Event::Kind::kAccumulate) {
          ++expected[event.units[0]];
        }
      }
      Rank rank{.cursor = SegmentCursor(
                    rules, recorded.empty() ? nullptr : &recorded[r], unsharded,
                    expected),
                .program = programs[r]};
      rank.memory.resize(num_units_);
      for (size_t u = 0; u < unsharded.size(); ++u) {
        if (unsharded[u] != 0) rank.memory[u] = 0;
      }
      rank.pending.resize(num_units_);
      rank.accumulated.resize(num_units_);
      ranks_.push_back(std::move(rank));
    }
  }

  Outcome run() {
    for (Rank& rank : ranks_) carry_out(rank, rank.cursor.begin());
    Outcome outcome;
    while (error_.empty() && outcome.result == RoundResult::kContinues) {
      std::vector<size_t> able;
      for (size_t r = 0; r < ranks_.size(); ++r) {
        if (can_advance(ranks_[r])) able.push_back(r);
      }
      if (!able.empty()) {
        advance(ranks_[able[random_() % able.size()]]);
      } else if (std::ranges::all_of(ranks_, [](const Rank& rank) {
                   return rank.state == Rank::State::kInRound;
                 })) {
        outcome.result = round();
      } else {
        error_ = "deadlock";
      }
    }
    for (Rank& rank : ranks_) {
      if (rank.issued != ranks_[0].issued) error_ += " sequences differ";
      if (outcome.result == RoundResult::kEnded) {
        std::vector<int64_t> sums(num_units_, 0);
        for (const auto& [unit, value] : rank.reduced) sums[unit] += value;
        if (sums != rank.accumulated) error_ += " a gradient is lost";
      }
      for (size_t u = 0; u < num_units_; ++u) {
        if (rank.memory[u].has_value() != rank.cursor.is_held(u)) {
          error_ += " memory is not released";
        }
      }
      outcome.num_rounds.push_back(rank.cursor.num_rounds());
      outcome.max_held.push_back(rank.max_held);
      outcome.records.push_back(rank.cursor.record());
      outcome.records.back().advance_gathers(prefetch_depth_);
      outcome.has_deviated.push_back(rank.cursor.has_deviated());
    }
    outcome.issued = ranks_[0].issued;
    outcome.error = error_;
    return outcome;
  }

  const Rank& rank(size_t r) const { return ranks_[r]; }

 private:
  bool can_advance(const Rank& rank) const {
    if (rank.state == Rank::State::kWaits) {
      return std::ranges::all_of(ranks_, [&](const Rank& other) {
        return other.issued.size() > rank.awaited;
      });
    }
    return rank.state == Rank::State::kRuns;
  }

  void advance(Rank& rank) {
    if (rank.state == Rank::State::kWaits) {
      rank.state = Rank::State::kRuns;
      ++rank.next;
      return;
    }
    CursorActions actions;
    if (rank.next == rank.program.size()) {
      rank.cursor.finish(actions);
      carry_out(rank, actions);
      rank.state = Rank::State::kInRound;
      rank.missing.reset();
      return;
    }
    const Event& event = rank.program[rank.next];
    switch (event.kind) {
      case Event::Kind::kFail:
        rank.cursor.fail(actions);
        std::ranges::fill(rank.pending, 0);
        carry_out(rank, actions);
        rank.state = Rank::State::kInRound;
        rank.missing.reset();
        return;
      case Event::Kind::kAccumulate: {
        const int64_t value = int64_t{1} << (rank.next % 40);
        rank.pending[event.units[0]] += value;
        rank.accumulated[event.units[0]] += value;
        rank.cursor.accumulated(event.units[0], actions);
        carry_out(rank, actions);
        ++rank.next;
        return;
      }
      case Event::Kind::kUse:
        rank.missing = rank.cursor.need(event.units, actions);
        carry_out(rank, actions);
        if (rank.missing) {
          rank.state = Rank::State::kInRound;
          return;
        }
        rank.awaited = 0;
        for (const size_t unit : event.units) {
          if (!rank.memory[unit]) {
            error_ += " unit " + std::to_string(unit) + " is not unsharded";
            return;
          }
          rank.awaited = std::max(rank.awaited, *rank.memory[unit]);
        }
        if (rank.issued.empty()) {  // units unsharded from the start
          ++rank.next;
        } else {
          rank.state = Rank::State::kWaits;
        }
        return;
    }
  }

  RoundResult round() {
    std::vector<RoundMessage> messages;
    for (const Rank& rank : ranks_) {
      messages.push_back(rank.cursor.message(rank.missing));
    }
    std::vector<RoundResult> results;
    for (Rank& rank : ranks_) {
      CursorActions actions;
      results.push_back(rank.cursor.end_round(messages, actions));
      carry_out(rank, actions);
      if (rank.missing) rank.state = Rank::State::kRuns;  // need() again
    }
    for (const RoundResult result : results) {
      if (result != results[0]) error_ += " results differ";
    }
    return results[0];
  }

  void carry_out(Rank& rank, const CursorActions& actions) {
    for (const auto& [kind, unit] : actions) {
      switch (kind) {
        case CursorAction::Kind::kAllGather:
          if (!rank.memory[unit]) {
            rank.memory[unit] = rank.issued.size();
            rank.max_held = std::max(rank.max_held, ++rank.num_held);
          }
          rank.issued.push_back({Kind::kAllGather, unit});
          break;
        case CursorAction::Kind::kReduceScatter:
          rank.issued.push_back({Kind::kReduceScatter, unit});
          rank.reduced.emplace_back(unit, rank.pending[unit]);
          rank.pending[unit] = 0;
          break;
        case CursorAction::Kind::kRelease:
          if (!rank.memory[unit]) error_ += " released twice";
          rank.memory[unit].reset();
          --rank.num_held;
          break;
      }
    }
  }

  const size_t num_units_;
  const size_t prefetch_depth_;
  std::mt19937 random_;
  std::vector<Rank> ranks_;
  std::string error_;
};

Outcome run(const UnitRules& rules, const std::vector<Program>& programs,
            const std::vector<RecordedSchedule>& recorded = {},
            uint32_t seed = 1) {
  return Model(rules, programs, recorded, seed).run();
}

std::vector<size_t> gathers_of(const Schedule& schedule) {
  std::vector<size_t> units;
  for (const ScheduleEntry& entry : schedule) {
    if (entry.kind == Kind::kAllGather) units.push_back(entry.unit);
  }
  return units;
}

ptrdiff_t place_of(const Schedule& schedule, const ScheduleEntry& entry) {
  return std::ranges::find(schedule, entry) - schedule.begin();
}

TEST(SegmentCursorTest, ReplaysInOneRoundAndTwoBuffers) {
  const std::vector<Program> programs(2, uses({0, 1, 2, 3}));
  const auto learned = run(flat_rules(4), programs);
  EXPECT_EQ(learned.error, "");
  EXPECT_EQ(gathers_of(learned.issued), (std::vector<size_t>{0, 1, 2, 3}));
  EXPECT_EQ(learned.num_rounds[0], 5);  // one per unit, then the status
  const auto replayed = run(flat_rules(4), programs, learned.records);
  EXPECT_EQ(replayed.error, "");
  EXPECT_EQ(replayed.issued, learned.issued);
  EXPECT_EQ(replayed.num_rounds, (std::vector<size_t>{1, 1}));
  EXPECT_EQ(replayed.max_held, (std::vector<size_t>{2, 2}));
}

TEST(SegmentCursorTest, ReducesDuringBackward) {
  const auto learned =
      run(flat_rules(3), {backward({2, 1, 0}), backward({2, 1, 0})});
  EXPECT_EQ(learned.error, "");
  const Schedule expected = {
      {Kind::kAllGather, 2},     {Kind::kAllGather, 1},
      {Kind::kReduceScatter, 2}, {Kind::kAllGather, 0},
      {Kind::kReduceScatter, 1}, {Kind::kReduceScatter, 0}};
  EXPECT_EQ(learned.issued, expected);
}

TEST(SegmentCursorTest, PrefetchPassesReductions) {
  UnitRules rules = flat_rules(4);
  rules.prefetch_depth = 2;
  const Program program = backward({3, 2, 1, 0});
  const auto learned = run(rules, {program, program});
  const Schedule expected = {
      {Kind::kAllGather, 3},     {Kind::kAllGather, 2},
      {Kind::kAllGather, 1},     {Kind::kReduceScatter, 3},
      {Kind::kAllGather, 0},     {Kind::kReduceScatter, 2},
      {Kind::kReduceScatter, 1}, {Kind::kReduceScatter, 0}};
  const auto replayed = run(rules, {program, program}, learned.records);
  EXPECT_EQ(replayed.error, "");
  EXPECT_EQ(replayed.issued, expected);
  EXPECT_EQ(replayed.max_held[0], 3);
}

TEST(SegmentCursorTest, ReducesAUnitThatOneRankSkipsBeforeTheEnd) {
  const auto learned =
      run(flat_rules(5), {backward({4, 3, 2, 1, 0}), backward({4, 2, 1, 0})});
  EXPECT_EQ(learned.error, "");
  // Rank 1 does not expect a gradient of unit 3.
  EXPECT_LT(place_of(learned.issued, {Kind::kReduceScatter, 3}),
            place_of(learned.issued, {Kind::kReduceScatter, 1}));
  EXPECT_LT(place_of(learned.issued, {Kind::kReduceScatter, 3}),
            place_of(learned.issued, {Kind::kAllGather, 0}));
}

TEST(SegmentCursorTest, OneRankDeviatesFromTheSchedule) {
  const Program all = backward({2, 1, 0});
  const auto learned = run(flat_rules(3), {all, all});
  const auto with = [&](const Program& other) {
    const auto outcome = run(flat_rules(3), {all, other}, learned.records);
    EXPECT_EQ(outcome.error, "");
    EXPECT_EQ(outcome.has_deviated[0], outcome.has_deviated[1]);
    return outcome;
  };
  const auto skips = with(backward({2, 0}));  // sends zeros
  EXPECT_EQ(skips.num_rounds[0], 1);
  EXPECT_EQ(skips.issued, learned.issued);
  EXPECT_FALSE(skips.has_deviated[0]);

  const auto is_late = with(backward({0, 1, 2}));
  EXPECT_TRUE(is_late.has_deviated[0]);
  EXPECT_EQ(std::ranges::count(is_late.issued,
                               ScheduleEntry{Kind::kReduceScatter, 2}),
            2);

  Program again = all;
  again.push_back(use({2}));
  const auto needs_again = with(again);
  EXPECT_TRUE(needs_again.has_deviated[0]);
  EXPECT_EQ(gathers_of(needs_again.issued), (std::vector<size_t>{2, 1, 0, 2}));
}

TEST(SegmentCursorTest, OuterUnitStaysUnshardedWhileInnerOnesRun) {
  UnitRules rules = flat_rules(4);
  for (size_t inner = 1; inner < 4; ++inner) rules.parents[inner] = 0;
  const Program program = uses({0, 1, 0, 2, 0, 3, 0});
  const auto learned = run(rules, {program, program});
  EXPECT_EQ(gathers_of(learned.issued), (std::vector<size_t>{0, 1, 2, 3}));
  const auto replayed = run(rules, {program, program}, learned.records);
  EXPECT_EQ(replayed.max_held[0], 3);
}

TEST(SegmentCursorTest, AlternatingUnitsAreGatheredEachTime) {
  const Program program = uses({0, 1, 0, 1});
  EXPECT_EQ(run(flat_rules(2), {program, program}).issued.size(), 4);
}

TEST(SegmentCursorTest, UnitsThatStayAreNotGatheredAgain) {
  UnitRules rules = flat_rules(2);
  rules.stays = {1, 1};
  Model forward(rules, std::vector<Program>(2, uses({0, 1, 0})), {}, 1);
  EXPECT_EQ(forward.run().issued.size(), 2);
  EXPECT_TRUE(forward.rank(0).cursor.is_held(0));
  EXPECT_TRUE(forward.rank(0).cursor.is_held(1));
  Model next(flat_rules(2), std::vector<Program>(2, backward({1, 0})), {}, 1,
             /*unsharded=*/{1, 1});
  const auto outcome = next.run();
  EXPECT_EQ(outcome.error, "");
  EXPECT_EQ(gathers_of(outcome.issued), std::vector<size_t>());
}

// All sequences of up to `longest` uses of `num_units` units.
std::vector<std::vector<size_t>> all_orders(size_t num_units, size_t longest) {
  std::vector<std::vector<size_t>> orders = {{}};
  for (size_t begin = 0, length = 0; length < longest; ++length) {
    const size_t end = orders.size();
    for (; begin < end; ++begin) {
      for (size_t unit = 0; unit < num_units; ++unit) {
        orders.push_back(orders[begin]);
        orders.back().push_back(unit);
      }
    }
  }
  return orders;
}

TEST(SegmentCursorTest, AllPairsOfShortForwardsLearnAndReplay) {
  const auto orders = all_orders(3, 3);
  for (size_t depth = 0; depth < 3; ++depth) {
    UnitRules rules = flat_rules(3);
    rules.prefetch_depth = depth;
    for (const auto& first : orders) {
      for (const auto& second : orders) {
        const std::vector<Program> programs = {uses(first), uses(second)};
        const auto learned = run(rules, programs);
        ASSERT_EQ(learned.error, "");
        ASSERT_EQ(learned.result, RoundResult::kEnded);
        const auto replayed = run(rules, programs, learned.records);
        ASSERT_EQ(replayed.error, "");
        ASSERT_EQ(replayed.issued, learned.issued);
        ASSERT_EQ(replayed.num_rounds, (std::vector<size_t>{1, 1}));
      }
    }
  }
}

TEST(SegmentCursorTest, AnyShortForwardIsRightAfterAnyOther) {
  const auto orders = all_orders(3, 3);
  for (const auto& recorded : orders) {
    const auto learned =
        run(flat_rules(3), std::vector<Program>(2, uses(recorded)));
    for (const auto& first : orders) {
      for (const auto& second : orders) {
        const auto outcome =
            run(flat_rules(3), {uses(first), uses(second)}, learned.records);
        ASSERT_EQ(outcome.error, "");
        ASSERT_EQ(outcome.result, RoundResult::kEnded);
        ASSERT_EQ(outcome.has_deviated[0], outcome.has_deviated[1]);
      }
    }
  }
}

Program random_program(std::mt19937& random, size_t num_units) {
  Program program;
  const size_t length = random() % 14;
  for (size_t i = 0; i < length; ++i) {
    const size_t unit = random() % num_units;
    switch (random() % 8) {
      case 0:
        program.push_back(use({unit, random() % num_units}));
        break;
      case 1:
      case 2:
      case 3:
        program.push_back(accumulate(unit));
        break;
      default:
        program.push_back(use({unit}));
    }
  }
  return program;
}

UnitRules random_rules(std::mt19937& random) {
  UnitRules rules = flat_rules(1 + random() % 6);
  for (size_t unit = 1; unit < rules.num_units(); ++unit) {
    if (random() % 2 == 0) rules.parents[unit] = random() % unit;
  }
  rules.stays.resize(rules.num_units());
  for (char& stays : rules.stays) stays = random() % 4 == 0 ? 1 : 0;
  rules.prefetch_depth = random() % 4;
  return rules;
}

// So a program may issue its own collectives between any two events.
TEST(SegmentCursorTest, EqualProgramsIssueAtTheSameEvents) {
  for (uint32_t seed = 0; seed < 3000; ++seed) {
    std::mt19937 random(seed);
    const UnitRules rules = random_rules(random);
    const auto draw = [&] { return random_program(random, rules.num_units()); };
    const auto learned = run(rules, {draw(), draw(), draw()}, {}, seed);
    const Program common = draw();
    std::vector<uint32_t> expected(rules.num_units());
    for (uint32_t& count : expected) count = random() % 5;
    std::vector<SegmentCursor> ranks;
    for (const RecordedSchedule& record : learned.records) {
      ranks.emplace_back(rules, &record, std::vector<char>(), expected);
      ranks.back().begin();
    }
    bool needs_round = false;
    for (const Event& event : common) {
      std::vector<CursorActions> actions(ranks.size());
      for (size_t r = 0; r < ranks.size(); ++r) {
        if (event.kind == Event::Kind::kAccumulate) {
          ranks[r].accumulated(event.units[0], actions[r]);
        } else {
          needs_round = ranks[r].need(event.units, actions[r]).has_value();
        }
      }
      ASSERT_EQ(actions[0], actions[1]) << seed;
      ASSERT_EQ(actions[0], actions[2]) << seed;
      if (needs_round) break;
    }
  }
}

TEST(SegmentCursorTest, RandomProgramsLearnReplayAndDiffer) {
  for (uint32_t seed = 0; seed < 3000; ++seed) {
    std::mt19937 random(seed);
    const UnitRules rules = random_rules(random);
    const size_t num_ranks = 1 + random() % 4;
    const auto draw = [&] {
      std::vector<Program> programs;
      const Program common = random_program(random, rules.num_units());
      for (size_t r = 0; r < num_ranks; ++r) {
        programs.push_back(random() % 2 == 0
                               ? common
                               : random_program(random, rules.num_units()));
      }
      return programs;
    };
    const auto programs = draw();
    const auto learned = run(rules, programs, {}, seed);
    ASSERT_EQ(learned.error, "") << seed;
    const auto replayed = run(rules, programs, learned.records, seed + 1);
    ASSERT_EQ(replayed.error, "") << seed;
    ASSERT_EQ(replayed.num_rounds, std::vector<size_t>(num_ranks, 1)) << seed;
    ASSERT_EQ(replayed.issued, learned.records[0].entries) << seed;
    ASSERT_FALSE(replayed.has_deviated[0]) << seed;

    auto others = draw();
    const auto other = run(rules, others, learned.records, seed + 2);
    ASSERT_EQ(other.error, "") << seed;
    ASSERT_EQ(other.result, RoundResult::kEnded) << seed;

    // Unexpected gradients are late, but not lost.
    Model unexpected(rules, others, learned.records, seed, {},
                     /*expects=*/false);
    ASSERT_EQ(unexpected.run().error, "") << seed;

    Program& failing = others[random() % num_ranks];
    failing.resize(random() % (failing.size() + 1));
    failing.push_back(fail());
    for (const auto& records :
         {learned.records, std::vector<RecordedSchedule>()}) {
      const auto failed = run(rules, others, records, seed + 3);
      ASSERT_EQ(failed.error, "") << seed;
      ASSERT_EQ(failed.result, RoundResult::kFailed) << seed;
    }
  }
}

TEST(RecordedScheduleTest, FingerprintDependsOnOrderAndKind) {
  const auto of = [](Schedule entries) {
    return RecordedSchedule{.entries = std::move(entries)}.fingerprint();
  };
  const uint64_t a = of({{Kind::kAllGather, 0}, {Kind::kAllGather, 1}});
  EXPECT_NE(a, of({{Kind::kAllGather, 1}, {Kind::kAllGather, 0}}));
  EXPECT_NE(a, of({{Kind::kAllGather, 0}, {Kind::kReduceScatter, 1}}));
  EXPECT_EQ(a, of({{Kind::kAllGather, 0}, {Kind::kAllGather, 1}}));
}

}  // namespace schedule_test
}  // namespace brigade
