#include "brigade/bucket_sweep/sweep.h"

#include <nlohmann/json.hpp>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

std::vector<std::vector<double>> one_step_each(
    const std::vector<double>& times) {
  std::vector<std::vector<double>> rounds;
  for (const double time : times) rounds.push_back({time});
  return rounds;
}

// 1 ms and 1 ns per byte.
const std::vector<CostPoint> kPoints = {{1'000'000, 0.002}, {3'000'000, 0.004}};

// One step per round of the default and of one other arm; 10 ms without a
// reducer.
SweepSamples samples_of(const std::vector<double>& default_ms,
                        const std::vector<double>& other_ms) {
  return {.num_ranks = 2,
          .names = {"a", "b", "c"},
          .rounds = static_cast<int64_t>(default_ms.size()),
          .steps = 1,
          .model = {.backward = {.parameters = {{1'000'000},
                                                {1'000'000},
                                                {1'000'000}},
                                 .order = {2, 1, 0},
                                 .ready_s = {0, 0.001, 0.002},
                                 .end_s = 0.002},
                    .points = kPoints,
                    .cost = *CollectiveCost::fit(kPoints)},
          .forward_ms = 8,
          .local_ms = one_step_each(std::vector<double>(default_ms.size(), 10)),
          .plans = {{.arms = {default_arm()},
                     .buckets = {{2}, {1, 0}},
                     .rounds_ms = one_step_each(default_ms),
                     .alone_ms = std::vector<double>(default_ms.size(), 4),
                     .timeline = {{0.001, 0.002}, {0.002, 0.005}}},
                    {.arms = {arm_of("4"), arm_of("one")},
                     .buckets = {{2, 1, 0}},
                     .rounds_ms = one_step_each(other_ms),
                     .alone_ms = std::vector<double>(other_ms.size(), 8)}}};
}

TEST(QuantilesTest, InterpolatesBetweenSamplesInAnyOrder) {
  const Quartiles found = quartiles({40, 10, 30, 20});
  EXPECT_EQ(found.p25, 17.5);
  EXPECT_EQ(found.median, 25);
  EXPECT_EQ(found.p75, 32.5);
}

TEST(QuantilesTest, ExtremesAreSamples) {
  EXPECT_EQ(quantile({5, 1, 9}, 0), 1);
  EXPECT_EQ(quantile({5, 1, 9}, 1), 9);
  EXPECT_EQ(quantile({7}, 0.5), 7);
}

std::vector<double> times(size_t count, double ms) {
  return std::vector<double>(count, ms);
}

TEST(SummaryTest, DifferencesAreTakenWithinARound) {
  SweepSamples samples = samples_of({20, 120}, {15, 110});
  samples.local_ms = {{10, 12, 14}, {100, 101, 102}};
  const SweepSummary summary = summarize(samples);
  EXPECT_EQ(summary.local_ms.median, 57);
  EXPECT_EQ(summary.arms[0].added_ms.median, (8 + 19) / 2.0);
  EXPECT_EQ(summary.arms[1].added_ms.median, (3 + 9) / 2.0);
  ASSERT_TRUE(summary.best);
  EXPECT_EQ(summary.best->saved_ms.p25, 6.25);
  EXPECT_EQ(summary.best->saved_ms.median, 7.5);
  EXPECT_EQ(summary.best->saved_ms.p75, 8.75);
}

TEST(SummaryTest, OverlapIsAFractionUnlessTheTimesAreTooShortOrTooNoisy) {
  const Quartiles step = {.p25 = 18, .median = 20, .p75 = 22};
  const auto overlap_of = [&](double exposed, double alone) {
    return ArmSummary{
        .step_ms = step, .added_ms = {.median = exposed}, .alone_ms = alone}
        .overlap();
  };
  EXPECT_EQ(overlap_of(6, 8), 0.25);
  EXPECT_EQ(overlap_of(10, 8), 0);
  EXPECT_EQ(overlap_of(-23, 8), 1);
  EXPECT_EQ(overlap_of(1, 3.9), std::nullopt);  // the quartiles differ by 4
  EXPECT_EQ((ArmSummary{.alone_ms = 0.09}.overlap()), std::nullopt);
}

TEST(SummaryTest, ASizeThatIsFasterInEveryRoundIsDecided) {
  const auto best = summarize(samples_of(times(8, 20), times(8, 18))).best;
  ASSERT_TRUE(best);
  EXPECT_EQ(best->arm, 1U);
  EXPECT_TRUE(best->decided);
  EXPECT_EQ(best->rounds_faster, 8);
  EXPECT_EQ(best->saved_share, 0.1);
}

TEST(SummaryTest, ASizeThatIsFasterByChanceIsNotDecided) {
  std::vector<double> other = times(8, 18);
  other[0] = other[5] = 21;
  const auto best = summarize(samples_of(times(8, 20), other)).best;
  ASSERT_TRUE(best);
  EXPECT_EQ(best->saved_ms.median, 2);
  EXPECT_FALSE(best->decided);
}

TEST(SummaryTest, TheSignificanceLevelIsCorrectedForTheNumberOfSizes) {
  SweepSamples samples = samples_of(times(5, 20), times(5, 18));
  EXPECT_TRUE(summarize(samples).best->decided);  // 1/32
  const PlanSamples again = samples.plans[1];
  samples.plans.push_back(again);
  EXPECT_FALSE(summarize(samples).best->decided);  // 2/32
}

TEST(SummaryTest, ADecidedSizeComesBeforeAFasterOneThatIsNot) {
  SweepSamples samples = samples_of(times(8, 20), times(8, 18));
  PlanSamples noisy = samples.plans[1];
  noisy.arms = {arm_of("1")};
  noisy.rounds_ms = one_step_each({10, 10, 10, 10, 10, 10, 25, 25});
  samples.plans.push_back(noisy);
  const auto best = summarize(samples).best;
  EXPECT_EQ(best->arm, 1U);
  EXPECT_TRUE(best->decided);
}

TEST(SummaryTest, StepsFarBelowTheBoundBelieTheModel) {
  EXPECT_FALSE(summarize(samples_of({20}, {12.8})).is_model_off);
  const SweepSummary summary = summarize(samples_of({20}, {10}));
  EXPECT_TRUE(summary.is_model_off);
  EXPECT_THAT(to_text("Net", summary),
              ::testing::HasSubstr("faster than its bound of 13.0 ms"));
}

TEST(SummaryTest, ManyRoundsAreDecidedToo) {
  EXPECT_TRUE(
      summarize(samples_of(times(1200, 20), times(1200, 18))).best->decided);
}

TEST(SummaryTest, WithoutAnotherPlanNothingIsRecommended) {
  SweepSamples samples = samples_of({20}, {18});
  samples.plans.pop_back();
  EXPECT_FALSE(summarize(samples).best);
}

SweepSummary summary_of(size_t rounds, double default_ms, double other_ms) {
  return summarize(samples_of(std::vector<double>(rounds, default_ms),
                              std::vector<double>(rounds, other_ms)));
}

TEST(ReportTest, TheTableHasARowPerPlanAndARecommendation) {
  EXPECT_EQ(
      to_text("Net", summary_of(8, 20, 18)),
      "Net: 3 parameters, 2.86 MiB\n"
      "step without communication: 10.0 ms [10.0, 10.0]\n"
      "cap        buckets  largest  step ms [p25, p75] model  added  alone "
      "overlap\n"
      "default          2 1.91 MiB   20.0 [20.0, 20.0]  13.0   10.0   4.00 "
      "    0 %\n"
      "4 MiB*           1 2.86 MiB   18.0 [18.0, 18.0]  14.0   8.00   8.00 "
      "    0 %\n"
      "* same buckets as 4 MiB: one\n"
      "A bucket's last parameter may exceed the cap. planned: buckets for "
      "this\n"
      "model and these links. model: predicted step; no plan is below 13.0 "
      "ms.\n"
      "added: ms that communication adds to a step; alone: ms of the\n"
      "all-reduces without a step; overlap: share of alone that backward\n"
      "hides, - if alone is too short to tell. Medians of the slowest rank;\n"
      "rounds: 8, steps per round: 1.\n"
      "recommended: bucket_cap_mb=4 (C++: bucket_cap_bytes = {4194304})\n"
      "  fastest in this run: 4 MiB, faster in 8 of 8 rounds,\n"
      "  2.00 ms less per step than the default (median of the rounds' "
      "differences;\n"
      "  quartiles 2.00 to 2.00)\n");
}

TEST(SummaryTest, ThePlanOfTheModelIsGivenByTheSizesOfItsBuckets) {
  SweepSamples samples = samples_of({20}, {20});
  BackwardModel& model = samples.model;
  EXPECT_EQ(planned_arm(model).label, "planned");
  model.cost = *CollectiveCost::linear(0, 1e-9);
  EXPECT_THAT(planned_arm(model).caps_bytes,
              ::testing::ElementsAre(1'000'000, 1'000'000, 1'000'000));
  model.cost = *CollectiveCost::linear(1, 1e-9);
  EXPECT_THAT(planned_arm(model).caps_bytes, ::testing::ElementsAre(3'000'000));
  for (ParameterSpec& spec : model.backward.parameters) spec.sparse = true;
  EXPECT_THAT(planned_arm(model).caps_bytes, ::testing::ElementsAre(1));
}

TEST(ReportTest, APlanIsRecommendedAsAListOfCaps) {
  SweepSamples samples =
      samples_of(std::vector<double>(8, 20), std::vector<double>(8, 18));
  samples.plans[1].arms = {{"planned", {1 << 20, 3 << 19}}};
  EXPECT_THAT(
      to_text("Net", summarize(samples)),
      ::testing::HasSubstr("recommended: bucket_cap_mb_list=[1, 1.5]\n"
                           "  (C++: bucket_cap_bytes = {1048576, 1572864})"));
  samples.plans[1].arms = {{"planned", std::vector<int64_t>(30, 1)}};
  EXPECT_THAT(
      to_text("Net", summarize(samples)),
      ::testing::HasSubstr("recommended: bucket_cap_mb_list of 30 caps"));
}

TEST(ReportTest, NoiseIsNotShownAsNegativeTimeOrAsOverlap) {
  SweepSamples samples = samples_of({9}, {9});
  samples.plans[0].alone_ms = {0.01};
  EXPECT_THAT(
      to_text("Net", summarize(samples)),
      ::testing::HasSubstr("[9.00, 9.00]  13.0   0.00   0.01       -\n"));
}

TEST(ReportTest, TheDefaultIsRecommendedUnlessAnotherSizeIsDecided) {
  const auto ends_with = [](const SweepSummary& summary, const char* sentence) {
    EXPECT_THAT(to_text("Net", summary),
                ::testing::EndsWith(absl::StrCat(sentence, "\n")));
  };
  ends_with(summary_of(5, 20, 21),
            "recommended: keep the default (no cap is reliably faster)");
  ends_with(summary_of(3, 20, 18),
            "recommended: keep the default (no cap is reliably faster)\n"
            "  fastest in this run: 4 MiB, faster in 3 of 3 rounds,\n"
            "  2.00 ms less per step than the default (median of the rounds' "
            "differences;\n"
            "  quartiles 2.00 to 2.00)\n"
            "  too few rounds (3) to decide between 2 caps: run again with "
            "--rounds 5 or more");
  SweepSamples alone = samples_of({20}, {20});
  alone.plans.pop_back();
  ends_with(summarize(alone),
            "recommended: keep the default (all caps give the same buckets)");
}

TEST(ReportTest, JsonHasTheNumbersOfTheTable) {
  const auto json = nlohmann::json::parse(
      to_json("a \"net\"", samples_of(times(8, 20), times(8, 18))));
  EXPECT_EQ(json["name"], "a \"net\"");
  EXPECT_EQ(json["gradient_bytes"], 3'000'000);
  const nlohmann::json& arm = json["arms"][1];
  EXPECT_EQ(arm["cap"], "4 MiB, one");
  EXPECT_EQ(arm["buckets"], 1);
  EXPECT_EQ(arm["step_ms"]["median"], 18);
  EXPECT_DOUBLE_EQ(arm["predicted_ms"], 14);
  EXPECT_EQ(arm["added_ms"]["p75"], 8);
  EXPECT_EQ(arm["rounds_ms"].size(), 8U);
  EXPECT_DOUBLE_EQ(arm["predicted_timeline"][0]["complete_ms"], 6);
  EXPECT_EQ(json["arms"][0]["timeline"][1]["bytes"], 2'000'000);
  EXPECT_EQ(json["ready"][0]["name"], "c");
  EXPECT_EQ(json["best"]["rounds_faster"], 8);
  EXPECT_EQ(json["best"]["decided"], true);
}

TEST(ReportTest, JsonGivesTheSamplesBack) {
  const std::string text =
      to_json("Net", samples_of(times(3, 20), times(3, 18)));
  const auto samples = samples_from_json(text);
  ASSERT_TRUE(samples.ok()) << samples.status();
  EXPECT_EQ(to_json("Net", *samples), text);
}

TEST(ReportTest, OtherTextsAreNoSamples) {
  const auto whole = nlohmann::json::parse(
      to_json("Net", samples_of(times(3, 20), times(3, 18))));
  const auto expect_error = [](const std::string& text) {
    EXPECT_THAT(samples_from_json(text).status().message(),
                ::testing::HasSubstr("JSON text of an earlier sweep"))
        << text;
  };
  expect_error("");
  expect_error("[]");
  for (const auto& [key, value] : whole.items()) {
    for (const auto& wrong : {nlohmann::json("text"), nlohmann::json(-1),
                              nlohmann::json::array()}) {
      nlohmann::json changed = whole;
      changed[key] = wrong;
      const auto samples = samples_from_json(changed.dump());  // no crash
      if (samples.ok()) to_json("Net", *samples);
    }
  }
  nlohmann::json changed = whole;
  changed["local_rounds_ms"].erase(0);
  expect_error(changed.dump());
  changed = whole;
  changed["arms"][1]["sizes"][0]["caps_bytes"] = nlohmann::json::array();
  expect_error(changed.dump());
  changed = whole;
  changed["arms"][1]["timeline"] = changed["arms"][0]["timeline"];
  expect_error(changed.dump());
  changed = whole;
  changed["arms"][1]["plan"] = {{0, 0, 1}};
  expect_error(changed.dump());
}

TEST(SummaryTest, ThreeTimesTheRoundsAreTakenIfChanceMayExplainAGain) {
  std::vector<double> other = times(8, 18);
  EXPECT_EQ(rounds_to_take(samples_of(times(8, 20), other)), 8);
  other[0] = other[5] = 21;
  EXPECT_EQ(rounds_to_take(samples_of(times(8, 20), other)), 24);
  EXPECT_EQ(rounds_to_take(samples_of(times(8, 20), times(8, 21))), 8);
  EXPECT_EQ(rounds_to_take(samples_of(times(8, 20), times(8, 19.9))), 8);
  // 6 rounds can't decide.
  EXPECT_EQ(rounds_to_take(samples_of(times(2, 20), times(2, 18))), 2);
  SweepSamples begun = samples_of(times(3, 20), other);
  begun.rounds = 8;
  EXPECT_EQ(rounds_to_take(begun), 8);
  begun.rounds = 2;
  EXPECT_EQ(rounds_to_take(begun), 6);
}

}  // namespace
}  // namespace brigade
