// Random programs on random networks and meshes: whatever ranks do, they find
// the bits of a single process.
//
// Ranks run a program and note what they see behind each operation. A model
// then runs the same program in one thread, on whole parameters, and compares.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <vector>

#include "brigade/tests/fsdp/fuzz_case.h"
#include "brigade/tests/fsdp/fuzz_model.h"
#include "brigade/tests/fsdp/fuzz_run.h"
#include "brigade/tests/support/local_ranks.h"
#include "gtest/gtest.h"

namespace brigade {
namespace sharded_fuzz_test {

using testing::Case;
using testing::draw_case;
using testing::expect_of_one_process;
using testing::Record;
using testing::run_on_rank;
using testing::run_ranks;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// By world size.
constexpr uint64_t kNumSeeds = 40;

// Groups are made once for so many seeds.
constexpr uint64_t kSeedsPerGroup = 20;

// To look at one failure.
constexpr std::optional<uint64_t> kOnlySeed = std::nullopt;

class ShardedFuzzTest : public ::testing::TestWithParam<int> {};

TEST_P(ShardedFuzzTest, ProgramsEqualOneProcess) {
  const int world_size = GetParam();
  std::vector<uint64_t> seeds;
  if (kOnlySeed.has_value()) {
    seeds.push_back(*kOnlySeed);
  } else {
    for (uint64_t seed = 1; seed <= kNumSeeds; ++seed) seeds.push_back(seed);
  }
  for (size_t begin = 0; begin < seeds.size(); begin += kSeedsPerGroup) {
    const size_t end = std::min(begin + kSeedsPerGroup, seeds.size());
    std::vector<Case> cases;
    for (size_t i = begin; i < end; ++i) {
      cases.push_back(draw_case(seeds[i], world_size));
    }
    // By case, by rank.
    std::vector<std::vector<Record>> records(cases.size(),
                                             std::vector<Record>(world_size));
    try {
      run_ranks(world_size, [&](const Group& group) {
        for (size_t i = 0; i < cases.size(); ++i) {
          Record& record = records[i][group->getRank()];
          run_on_rank(cases[i], group, record);
        }
      });
    } catch (const std::exception&) {
      // It is in the records.
    }
    for (size_t i = 0; i < cases.size(); ++i) {
      SCOPED_TRACE(describe(cases[i]));
      for (int rank = 0; rank < world_size; ++rank) {
        const Record& record = records[i][rank];
        EXPECT_TRUE(record.failure.empty())
            << "rank " << rank << ", operation " << record.sights.size() << ": "
            << record.failure;
      }
      if (HasFailure()) return;
      expect_of_one_process(cases[i], records[i]);
      if (HasFailure()) return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, ShardedFuzzTest, ::testing::Values(1, 2, 3, 4));

}  // namespace sharded_fuzz_test
}  // namespace brigade
