// The same program in one thread, on whole parameters.

#ifndef BRIGADE_TESTS_FSDP_FUZZ_MODEL_H_
#define BRIGADE_TESTS_FSDP_FUZZ_MODEL_H_

#include <vector>

#include "brigade/tests/fsdp/fuzz_case.h"
#include "brigade/tests/fsdp/fuzz_run.h"

namespace brigade::testing {

// Compares what ranks have noted, bit by bit. `records`: by rank.
void expect_of_one_process(const Case& c, const std::vector<Record>& records);

}  // namespace brigade::testing

#endif  // BRIGADE_TESTS_FSDP_FUZZ_MODEL_H_
