#include <nlohmann/json.hpp>

#include "brigade/bucket_sweep/summary.h"
#include "brigade/tests/bucket_sweep/samples.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using testing::samples_of;

SweepSummary summary_of(size_t rounds, double default_ms, double other_ms) {
  return summarize(samples_of(std::vector<double>(rounds, default_ms),
                              std::vector<double>(rounds, other_ms)));
}

TEST(ReportTest, TheTableHasARowPerPlanAndASentence) {
  EXPECT_EQ(
      to_text("Net", summary_of(8, 20, 18), "3 ms asleep"),
      "Net: 3 gradients, 3.00 MB; backward 3 ms asleep; step without a reducer "
      "10.0 ms [10.0, 10.0]\n"
      "cap         buckets       min   median      max   step ms        [p25, "
      "p75]  exposed ms  alone ms  overlap  sums\n"
      "default           2   1.00 MB  1.50 MB  2.00 MB      20.0      [20.0, "
      "20.0]        10.0       4.0     none  WRONG\n"
      "4 MiB, one        1   3.00 MB  3.00 MB  3.00 MB      18.0      [18.0, "
      "18.0]         8.0       8.0     none  right\n"
      "recommended: bucket_caps_bytes = {4194304} or bucket_cap_mb=4 (4 MiB, "
      "one); 2.0 ms (10.0 %) less per step than the default [2.0, 2.0], faster "
      "in 8 of 8 rounds\n");
}

TEST(ReportTest, TheSentenceSaysWhenTheDefaultIsToBeKept) {
  EXPECT_EQ(recommendation(summary_of(4, 20, 21)),
            "recommended: the default; no other size is faster");
  EXPECT_EQ(recommendation(summary_of(3, 20, 18)),
            "recommended: the default; 4 MiB, one: 2.0 ms (10.0 %) less per "
            "step than the default [2.0, 2.0], faster in 3 of 3 rounds, which "
            "may be chance");
  SweepSamples alone = samples_of({20}, {20});
  alone.tracks.pop_back();
  EXPECT_EQ(recommendation(summarize(alone)),
            "recommended: the default; every size tried gives its buckets");
}

TEST(ReportTest, JsonHasWhatTheTableHas) {
  const auto json =
      nlohmann::json::parse(to_json("a \"net\"", summary_of(8, 20, 18)));
  EXPECT_EQ(json["name"], "a \"net\"");
  EXPECT_EQ(json["backward"], "computed");
  EXPECT_EQ(json["gradient_bytes"], 3'000'000);
  EXPECT_EQ(json["arms"][1], nlohmann::json::parse(R"({
      "cap": "4 MiB, one", "caps_bytes": [4194304], "buckets": 1,
      "bucket_bytes": {"min": 3e6, "median": 3e6, "max": 3e6},
      "step_ms": {"p25": 18.0, "median": 18.0, "p75": 18.0},
      "exposed_ms": {"p25": 8.0, "median": 8.0, "p75": 8.0},
      "alone_ms": 8.0, "overlap": 0.0, "sums_verified": true})"));
  EXPECT_EQ(json["best"]["rounds_faster"], 8);
  EXPECT_EQ(json["best"]["decided"], true);
}

}  // namespace
}  // namespace brigade
