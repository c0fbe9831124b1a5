#include <c10/util/Exception.h>

#include <limits>

#include "brigade/bucket_sweep/measurement.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using Caps = std::vector<int64_t>;

TEST(BucketArmTest, WordsAndSizesBecomeCaps) {
  EXPECT_EQ(default_arm().caps_bytes, (Caps{1 << 20, 25 << 20}));
  EXPECT_EQ(arm_of("each").caps_bytes, Caps{1});
  EXPECT_EQ(arm_of("one").caps_bytes,
            Caps{std::numeric_limits<int64_t>::max()});
  EXPECT_EQ(arm_of("0.25").caps_bytes, Caps{1 << 18});
  EXPECT_EQ(arm_of("0.25").label, "0.25 MiB");
  EXPECT_EQ(arm_of("100").label, "100 MiB");
}

TEST(BucketArmTest, WhatIsNoSizeIsRefused) {
  for (const char* const cap : {"x", "-1", "0", "nan", "", "1e9", "1 MiB"}) {
    EXPECT_THROW(arm_of(cap), c10::ValueError) << cap;
  }
}

}  // namespace
}  // namespace brigade
