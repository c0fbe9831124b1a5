// What a sweep's times say: medians with quartiles, paired differences, and
// whether another size than the default's is worth choosing; as a table to read
// and as JSON.
//
// Thread safety: pure functions of what was measured.

#ifndef BRIGADE_BUCKET_SWEEP_SUMMARY_H_
#define BRIGADE_BUCKET_SWEEP_SUMMARY_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "brigade/bucket_sweep/measurement.h"
#include "brigade/bucket_sweep/quantiles.h"

namespace brigade {

struct ArmSummary {
  std::string label = {};                // of all arms that give these buckets
  std::vector<int64_t> caps_bytes = {};  // of the first of them
  std::vector<int64_t> bucket_bytes = {};
  Quartiles step_ms = {};

  // What the step takes longer than one of the same round without a reducer.
  Quartiles exposed_ms = {};

  // All-reduces of buffers as large as the buckets, one after the other, while
  // nothing else is done.
  double alone_ms = 0;

  bool sums_verified = false;  // all ranks had the right averages

  // The share of alone_ms that backward hides. Negative when packing, latency
  // and waiting for the slower rank cost more than backward hides.
  double overlap() const { return 1 - exposed_ms.median / alone_ms; }
};

// The fastest arm beside the default, compared with it round by round.
struct Recommendation {
  size_t arm = 0;           // index into SweepSummary::arms
  Quartiles saved_ms = {};  // per step, of the default's
  double saved_share = 0;   // median, of the default's median
  int64_t rounds_faster = 0;
  int64_t rounds = 0;

  // Chance alone is an unlikely explanation: with a fair coin per round, and so
  // many arms to choose from, below 1 in 20.
  bool decided = false;
};

struct SweepSummary {
  int64_t num_parameters = 0;
  int64_t gradient_bytes = 0;
  Quartiles local_ms = {};                  // a step without a reducer
  std::vector<ArmSummary> arms = {};        // the first is the default
  std::optional<Recommendation> best = {};  // none: all arms are the default's
};

SweepSummary summarize(const SweepSamples& samples);

// That a fair coin shows heads so many times or more often.
double chance_of(int64_t heads, int64_t throws);

// A line with what was trained, a row per plan, and recommendation(). `name`
// and `backward` ("computed", "102 ms asleep") stand in the first line.
std::string to_text(const std::string& name, const SweepSummary& summary,
                    const std::string& backward = "computed");

// One sentence: what to set, and what it saves.
std::string recommendation(const SweepSummary& summary);

// The same as one JSON object.
std::string to_json(const std::string& name, const SweepSummary& summary,
                    const std::string& backward = "computed");

// "18 kB", "2.36 MB", "154 MB": three digits.
std::string readable_bytes(double bytes);

}  // namespace brigade

#endif  // BRIGADE_BUCKET_SWEEP_SUMMARY_H_
