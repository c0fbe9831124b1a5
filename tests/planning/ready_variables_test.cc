#include "brigade/planning/ready_variables.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(ReadyVariablesTest, RememberWhatIsMissing) {
  ReadyVariables ready(4);
  EXPECT_THAT(ready.missing(), ElementsAre(0, 1, 2, 3));
  ready.mark(3);
  ready.mark(0);
  EXPECT_THAT(ready.missing(), ElementsAre(1, 2));
  EXPECT_TRUE(ready.is_ready(3));
  EXPECT_FALSE(ready.is_ready(1));
  ready.mark(1);
  ready.mark(2);
  EXPECT_THAT(ready.missing(), IsEmpty());
}

}  // namespace
}  // namespace brigade
