// A layout whose arguments are right.

#ifndef BRIGADE_TESTS_FSDP_LAYOUT_OF_H_
#define BRIGADE_TESTS_FSDP_LAYOUT_OF_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "brigade/fsdp/shard_layout.h"
#include "gtest/gtest.h"

namespace brigade::testing {

inline ShardLayout layout_of(std::vector<ShardSpec> parameters,
                             int64_t num_ranks, int64_t alignment = 1) {
  auto layout =
      ShardLayout::create(std::move(parameters), num_ranks, alignment);
  EXPECT_TRUE(layout.ok()) << layout.status();
  return *std::move(layout);
}

}  // namespace brigade::testing

#endif  // BRIGADE_TESTS_FSDP_LAYOUT_OF_H_
