#include "brigade/fsdp/schedule/unit_calls.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace unit_calls_test {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

UnitTurn begin_of(size_t unit) { return {.unit = unit, .begins = true}; }
UnitTurn end_of(size_t unit) { return {.unit = unit, .begins = false}; }

TEST(UnitCallsTest, NoCallsHaveNoTurns) {
  EXPECT_THAT(turns_of({}), IsEmpty());
  EXPECT_THAT(backward_order_of({}), IsEmpty());
}

TEST(UnitCallsTest, ACallEndsBeforeTheNextThatIsNotInsideOfIt) {
  const std::vector<UnitCall> calls = {{4, 0}, {0, 1}, {2, 1}, {3, 2}, {1, 0}};
  EXPECT_THAT(
      turns_of(calls),
      ElementsAre(begin_of(4), begin_of(0), end_of(0), begin_of(2), begin_of(3),
                  end_of(3), end_of(2), end_of(4), begin_of(1), end_of(1)));
  EXPECT_THAT(backward_order_of(calls), ElementsAre(1, 4, 2, 3, 0));
}

TEST(UnitCallsTest, DepthsMayLeaveSomeOut) {
  const std::vector<UnitCall> calls = {{0, 2}, {1, 5}, {2, 3}};
  EXPECT_THAT(turns_of(calls), ElementsAre(begin_of(0), begin_of(1), end_of(1),
                                           begin_of(2), end_of(2), end_of(0)));
}

}  // namespace unit_calls_test
}  // namespace brigade
