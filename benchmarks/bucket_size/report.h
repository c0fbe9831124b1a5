// How a sweep's figures are shown: as a table to read, and as JSON.
//
// Thread safety: pure functions.

#ifndef BRIGADE_BENCHMARKS_BUCKET_SIZE_REPORT_H_
#define BRIGADE_BENCHMARKS_BUCKET_SIZE_REPORT_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "brigade/benchmarks/bucket_size/sweep.h"
#include "brigade/benchmarks/support/set_up.h"

namespace brigade::benchmarks {

struct ModelReport {
  std::string name;
  std::string backward;  // what stands for it: "computed", "102 ms asleep"
  int64_t num_parameters = 0;
  int64_t gradient_bytes = 0;
  SweepResult result;
};

std::string to_text(const SetUp& set_up);
std::string to_text(const ModelReport& report);
nlohmann::ordered_json to_json(const SetUp& set_up,
                               const std::vector<ModelReport>& reports);

}  // namespace brigade::benchmarks

#endif  // BRIGADE_BENCHMARKS_BUCKET_SIZE_REPORT_H_
