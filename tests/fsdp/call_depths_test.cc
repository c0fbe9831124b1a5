#include "brigade/fsdp/schedule/call_depths.h"

#include "gtest/gtest.h"

namespace brigade {
namespace call_depths_test {

TEST(CallDepthsTest, NamesTellBeforeAForwardHasBeenSeen) {
  const CallDepths depths(
      {"", "blocks.1", "blocks.1.mlp", "blocks.10", "blocks.1.mlp.up.inner"});
  EXPECT_EQ(depths.of(0), 0);
  EXPECT_EQ(depths.of(1), 1);
  EXPECT_EQ(depths.of(2), 2);
  EXPECT_EQ(depths.of(3), 1);
  EXPECT_EQ(depths.of(4), 3);
}

TEST(CallDepthsTest, WithoutAnOutermostUnitNoneIsInsideOfIt) {
  const CallDepths depths({"first", "second", "second.part"});
  EXPECT_EQ(depths.of(0), 0);
  EXPECT_EQ(depths.of(1), 0);
  EXPECT_EQ(depths.of(2), 1);
}

TEST(CallDepthsTest, TheDeepestCallOfTheLastForwardCounts) {
  CallDepths depths({"a", "b", "c"});
  depths.begin_forward();
  depths.note(1, 1);
  depths.note(1, 3);
  depths.note(1, 2);
  depths.note(2, 1);
  EXPECT_EQ(depths.of(1), 3);
  depths.begin_forward();
  depths.note(1, 0);
  EXPECT_EQ(depths.of(1), 0);
  EXPECT_EQ(depths.of(2), 1) << "not called since";
}

}  // namespace call_depths_test
}  // namespace brigade
