// Which entries of a sequence are launched when, in which order, and what is
// launched in their place; without autograd.

#include "brigade/engine/launching/launching.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/comm/recording_group.h"
#include "brigade/engine/delivery.h"
#include "brigade/engine/running_iteration.h"
#include "brigade/tests/engine/scripted_policy.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::left_out;
using testing::on_group;
using testing::owners_word;
using testing::ScriptedEntry;
using testing::ScriptedPolicy;
using testing::Step;
using ::testing::ThrowsMessage;
using testing::without_pack;
using testing::without_unit;

using Entries = std::vector<size_t>;

class LaunchingTest : public ::testing::Test {
 protected:
  // A backward begins that brings gradients to these.
  void sequence(const std::vector<ScriptedEntry>& entries) {
    entries_ = entries;
    entry_of_.clear();
    for (size_t e = 0; e < entries.size(); ++e) {
      entry_of_.insert(entry_of_.end(), entries[e].num_gradients, e);
    }
    const ScriptedPolicy::Groups groups = {recording_.group(),
                                           second_recording_.group()};
    policy_ = std::make_unique<ScriptedPolicy>(groups, entries);
    state_.reset(new EngineState{
        .groups = groups,
        .policy = *policy_,
        .options = {.name = "Engine",
                    .failure_patience = std::chrono::seconds(1),
                    .one_backward_per_forward = true},
        .num_replicas = 1,
        .num_parameters = policy_->num_variables(),
        .describe_progress = {},
        .peers = PeerStatus(groups, /*has_channel=*/true),
    });
    state_->adopt_sequence();
    state_->iteration = state_->make_iteration(/*number=*/1);
    state_->phase = Phase::kReducing;
    launch_ready(*state_);
  }

  // A gradient is.
  void ready(size_t gradient) { word(entry_of_[gradient]); }

  // The owner gives its word.
  void word(size_t entry) {
    if (mark_and_pack(*state_, entry)) launch_ready(*state_);
  }

  void fails_at(size_t entry, Step step = Step::kLaunch) {
    policy_->fail(step, entry);
  }

  // Since the last call.
  void expect_events(const std::vector<std::string>& events) {
    EXPECT_THAT(policy_->events(), ElementsAreArray(events));
  }

  // By launch() since the last call, in this order; whatever was packed.
  void expect_launched(const Entries& entries) {
    std::vector<std::string> launches = policy_->events();
    std::erase_if(launches, [](const std::string& event) {
      return !event.starts_with("launch");
    });
    std::vector<std::string> expected;
    for (const size_t entry : entries) {
      expected.push_back(absl::StrCat("launch ", entry));
    }
    EXPECT_THAT(launches, ElementsAreArray(expected));
  }

  // Those whose turn has come, whether they were left out or not.
  size_t num_passed() const {
    size_t count = 0;
    for (size_t e = 0; e < entries_.size(); ++e) {
      count += state_->iteration->order.is_launched(e);
    }
    return count;
  }

  EngineStatistics statistics() const { return state_->observations; }

  RecordingGroup recording_{2};
  RecordingGroup second_recording_{2};
  std::vector<ScriptedEntry> entries_;
  std::vector<size_t> entry_of_;  // by gradient
  std::unique_ptr<ScriptedPolicy> policy_;
  std::unique_ptr<EngineState> state_;
};

TEST_F(LaunchingTest, HoldsALaterEntryUntilTheEarlierOnesAreReady) {
  sequence({2, 1, 0});
  ready(2);
  expect_launched({});
  ready(1);
  expect_launched({});
  ready(0);
  expect_launched({0, 1, 2});
}

TEST_F(LaunchingTest, PacksAnEntryOnItsLastGradientWhateverItsTurn) {
  sequence({1, 2});
  ready(2);
  expect_events({});
  ready(1);
  expect_events({"pack 1"});
  ready(0);
  expect_events({"pack 0", "launch 0", "launch 1"});
}

TEST_F(LaunchingTest, AnEntryThatWaitsForNothingFollowsTheOneBefore) {
  sequence({0, 1, 0, 0, 1});
  expect_events({"launch 0"});
  ready(1);
  expect_events({"pack 4"});
  ready(0);
  expect_events({"pack 1", "launch 1", "launch 2", "launch 3", "launch 4"});
}

TEST_F(LaunchingTest, AnEntryMayWaitForItsOwnersWord) {
  sequence({1, owners_word(), 1});
  ready(0);
  ready(1);
  expect_events({"pack 0", "launch 0", "pack 2"});
  word(1);
  expect_events({"pack 1", "launch 1", "launch 2"});
}

TEST_F(LaunchingTest, AWordBeforeItsTurnIsKept) {
  sequence({1, owners_word()});
  word(1);
  expect_events({"pack 1"});
  ready(0);
  expect_events({"pack 0", "launch 0", "launch 1"});
}

TEST_F(LaunchingTest, WhatNeedsNoPackIsNotPacked) {
  sequence({without_pack(1), 1});
  ready(0);
  ready(1);
  expect_events({"launch 0", "pack 1", "launch 1"});
}

TEST_F(LaunchingTest, WhatIsLeftOutIsPackedAndPassedOver) {
  sequence({1, left_out(1), left_out(0), 1});
  ready(1);
  ready(0);
  ready(2);
  expect_events({"pack 1", "pack 0", "launch 0", "pack 3", "launch 3"});
  EXPECT_EQ(num_passed(), 4);
  EXPECT_EQ(recording_.log().size(), 2);
}

TEST_F(LaunchingTest, WhatIsLeftOutWaitsForItsGradientsToo) {
  sequence({left_out(1), 1});
  ready(1);
  EXPECT_EQ(num_passed(), 0);
  ready(0);
  EXPECT_EQ(num_passed(), 2);
}

TEST_F(LaunchingTest, CountsEntriesWithAUnit) {
  sequence({1, without_unit(0), left_out(1), without_unit(left_out(0)), 1});
  for (const size_t gradient : {0, 1, 2}) ready(gradient);
  EXPECT_EQ(statistics().units_launched, 2);
  EXPECT_EQ(statistics().units_left_out, 1);
}

TEST_F(LaunchingTest, AMarkedVariableIsNotMissingAnyMore) {
  sequence({1, 2});
  RunningIteration iteration(*state_);
  iteration.mark(2, {.entry = 1, .has_gradient = false});
  EXPECT_THAT(state_->iteration->ready.missing(), ElementsAre(0, 1));
  iteration.mark(1, {.entry = 1});
  expect_events({"pack 1"});
}

TEST_F(LaunchingTest, AShadowLaunchesSubstitutes) {
  sequence({1, left_out(1), 1});
  state_->iteration->is_shadow = true;
  state_->iteration->order.mark_all();
  launch_ready(*state_);
  expect_events({"substitute 0", "substitute 2"});
  EXPECT_EQ(num_passed(), 3);
}

// ---- Two groups.

TEST_F(LaunchingTest, GroupsDoNotWaitForEachOther) {
  sequence({1, on_group(1, 1), 0, on_group(1, 0)});
  ready(1);
  expect_events({"pack 1", "launch 1", "launch 3"});
  ready(0);
  expect_events({"pack 0", "launch 0", "launch 2"});
  EXPECT_EQ(recording_.log().size(), 2);
  EXPECT_EQ(second_recording_.log().size(), 2);
}

TEST_F(LaunchingTest, WhatIsLeftOutOfAGroupIsPassedOverThere) {
  sequence({on_group(1, 1), on_group(1, left_out(1)), 1, on_group(1, 1)});
  ready(3);
  ready(1);
  expect_events({"pack 3", "pack 1"});
  ready(0);
  expect_events({"pack 0", "launch 0", "launch 3"});
  EXPECT_EQ(num_passed(), 3);
}

TEST_F(LaunchingTest, WhatEntriesUpToOneDeliverIsTheirGroups) {
  sequence({1, on_group(1, 1), 1, on_group(1, 1)});
  for (const size_t gradient : {3, 1, 0, 2}) ready(gradient);
  policy_->events();
  deliver_through(*state_, *state_->iteration, 3);
  expect_events({"deliver 1", "deliver 3"});
  deliver_through(*state_, *state_->iteration, 0);
  expect_events({"deliver 0"});
  deliver_through(*state_, *state_->iteration, 2);
  expect_events({"deliver 2"});
}

// ---- Failures.

TEST_F(LaunchingTest, AnEntryWhoseLaunchThrowsStaysTheNextOne) {
  sequence({1, 1, 1});
  policy_->traits.fails_by_network_only = false;
  fails_at(1);
  ready(0);
  ready(2);
  EXPECT_THAT([&] { ready(1); },
              ThrowsMessage<c10::Error>(
                  HasSubstr("Engine: entry 1 in iteration 1 on rank 0")));
  expect_events({"pack 0", "launch 0", "pack 2", "pack 1"});
  EXPECT_EQ(num_passed(), 1);
  EXPECT_EQ(state_->iteration->launches.size(), 1);
  EXPECT_EQ(statistics().units_launched, 1);
  EXPECT_EQ(state_->phase, Phase::kFailed);
}

TEST_F(LaunchingTest, AnEntryThatOnlyTheNetworkFailsLosesTheGroup) {
  sequence({1, 1});
  fails_at(0);
  EXPECT_THROW(ready(0), c10::DistBackendError);
  EXPECT_EQ(state_->phase, Phase::kOver);
  EXPECT_TRUE(state_->peers.is_closed());
}

TEST_F(LaunchingTest, AnEntryThatCannotBePackedIsNotLaunched) {
  sequence({1, 1});
  fails_at(0, Step::kPack);
  EXPECT_THROW(ready(0), testing::ScriptedError);
  expect_events({});
  EXPECT_EQ(num_passed(), 0);
}

TEST_F(LaunchingTest, TheRestBeginsWithTheEntryThatFailed) {
  sequence({1, 1, 1});
  fails_at(1);
  ready(0);
  EXPECT_ANY_THROW(ready(1));
  policy_->events();
  launch_rest(*state_, *state_->iteration);
  expect_events({"substitute 1", "substitute 2"});
  EXPECT_EQ(statistics().units_launched, 3);
}

TEST_F(LaunchingTest, TheRestBeginsAfterWhatWasLaunched) {
  sequence({1, 1, 1});
  ready(0);
  policy_->events();
  launch_rest(*state_, *state_->iteration);
  expect_events({"substitute 1", "substitute 2"});
}

TEST_F(LaunchingTest, TheRestPassesOverWhatIsLeftOut) {
  sequence({1, left_out(1), without_unit(0), left_out(0), 1, 1});
  ready(0);
  policy_->events();
  launch_rest(*state_, *state_->iteration);
  expect_events({"substitute 2", "substitute 4", "substitute 5"});
}

TEST_F(LaunchingTest, ASubstituteThatThrowsEndsTheRest) {
  sequence({1, 1, 1});
  fails_at(1, Step::kSubstitute);
  EXPECT_THROW(launch_rest(*state_, *state_->iteration),
               testing::ScriptedError);
  expect_events({"substitute 0"});
}

// ---- Every order.

// What a sequence of entries is to come to, whatever the order of words and
// gradients.
class Expectation {
 public:
  explicit Expectation(const std::vector<ScriptedEntry>& entries)
      : entries_(entries) {
    for (const ScriptedEntry& entry : entries) {
      pending_.push_back(entry.waits_for_word ? 1 : entry.num_gradients);
    }
  }

  // One of those that `entry` waits for comes; returns what is to happen.
  std::vector<std::string> mark(size_t entry) {
    std::vector<std::string> events;
    if (--pending_[entry] == 0) events.push_back(absl::StrCat("pack ", entry));
    for (const std::string& launch : pass()) events.push_back(launch);
    return events;
  }

  // What needs nothing more, as far as nothing is pending before it on its
  // group.
  std::vector<std::string> pass() {
    std::vector<std::string> events;
    for (size_t group = 0; group < passed_.size(); ++group) {
      for (size_t& next = passed_[group]; next < entries_.size(); ++next) {
        if (entries_[next].group != group) continue;
        if (pending_[next] > 0) break;
        if (entries_[next].is_left_out) continue;
        events.push_back(absl::StrCat("launch ", next));
      }
    }
    return events;
  }

 private:
  const std::vector<ScriptedEntry> entries_;
  std::vector<size_t> pending_;
  std::array<size_t, 2> passed_ = {};  // by group
};

// Of each entry, as often as it waits for something.
Entries marks_of(const std::vector<ScriptedEntry>& entries) {
  Entries marks;
  for (size_t e = 0; e < entries.size(); ++e) {
    const size_t count =
        entries[e].waits_for_word ? 1 : entries[e].num_gradients;
    marks.insert(marks.end(), count, e);
  }
  return marks;
}

class EveryOrderTest : public LaunchingTest {
 protected:
  void expect_order(const std::vector<ScriptedEntry>& entries,
                    const Entries& marks) {
    sequence(entries);
    Expectation expectation(entries);
    ASSERT_EQ(policy_->events(), expectation.pass());
    for (const size_t entry : marks) {
      word(entry);
      ASSERT_EQ(policy_->events(), expectation.mark(entry));
    }
    EXPECT_TRUE(state_->iteration->order.all_launched());
  }
};

TEST_F(EveryOrderTest, OfSmallSequencesLaunchesInSequence) {
  const std::vector<std::vector<ScriptedEntry>> sequences = {
      {2, 1, 0},
      {0, 3, 2},
      {1, 1, 1, 1, 1},
      {2, owners_word(), left_out(1), 0, 2},
      {left_out(0), owners_word(), owners_word(), without_unit(0), 3}};
  for (const std::vector<ScriptedEntry>& entries : sequences) {
    Entries marks = marks_of(entries);
    do {
      expect_order(entries, marks);
    } while (std::next_permutation(marks.begin(), marks.end()));
  }
}

TEST_F(EveryOrderTest, OfRandomSequencesLaunchesInSequence) {
  std::mt19937 random(/*seed=*/17);
  for (int round = 0; round < 300; ++round) {
    std::vector<ScriptedEntry> entries;
    const size_t num_entries = 1 + random() % 20;
    while (entries.size() < num_entries) {
      ScriptedEntry entry = random() % 5 == 0 ? owners_word() : random() % 4;
      if (random() % 4 == 0) entry = without_unit(entry);
      if (random() % 4 == 0) entry = left_out(entry);
      if (round % 2 == 1) entry = on_group(random() % 2, entry);
      entries.push_back(entry);
    }
    Entries marks = marks_of(entries);
    std::shuffle(marks.begin(), marks.end(), random);
    SCOPED_TRACE(round);
    expect_order(entries, marks);
  }
}

}  // namespace
}  // namespace brigade
