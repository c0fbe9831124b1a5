// How a sweep's figures are shown: as a table to read, and as JSON.
//
// Thread safety: pure functions.

#ifndef BRIGADE_BUCKET_SWEEP_REPORT_H_
#define BRIGADE_BUCKET_SWEEP_REPORT_H_

#include <string>

#include "brigade/bucket_sweep/summary.h"

namespace brigade {

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

#endif  // BRIGADE_BUCKET_SWEEP_REPORT_H_
