#include "brigade/reducer/backward_membership.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace backward_membership_test {

using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::IsEmpty;
using ::testing::Optional;

constexpr int kBackward = 5;  // by its id

TEST(BackwardMembershipTest, IsDecidedByTheOutputsBehindALocalForward) {
  BackwardMembership membership;
  membership.prepared(/*outputs_are_watched=*/true);
  EXPECT_FALSE(membership.is_undecided(kBackward));
  membership.note_local_forward();
  EXPECT_TRUE(membership.is_undecided(kBackward));
  membership.prepared(/*outputs_are_watched=*/true);
  EXPECT_FALSE(membership.is_undecided(kBackward));
}

TEST(BackwardMembershipTest, IsTakenForGrantedWhereOutputsCannotReport) {
  BackwardMembership membership;
  membership.prepared(/*outputs_are_watched=*/false);
  membership.note_local_forward();
  EXPECT_FALSE(membership.is_undecided(kBackward));
}

// And of backwards inside of it.
TEST(BackwardMembershipTest,
     IsDecidedByTheOutputsInTheBackwardOfALocalForward) {
  for (const bool are_watched : {true, false}) {
    BackwardMembership membership;
    EXPECT_TRUE(membership.local_output_reached(kBackward));
    EXPECT_FALSE(membership.local_output_reached(kBackward));
    membership.prepared(are_watched);
    EXPECT_FALSE(membership.is_undecided(kBackward - 1));
    EXPECT_TRUE(membership.is_undecided(kBackward));
    membership.local_backward_ended(kBackward);
    EXPECT_FALSE(membership.is_undecided(kBackward));
  }
}

TEST(BackwardMembershipTest, EarlyGradientsAreThoseOfTheBackwardThatReaches) {
  BackwardMembership membership;
  for (const int id : {3, 5, 4, 6}) membership.keep({.backward_id = id});
  EXPECT_THAT(membership.take_from(5),
              ElementsAre(Field(&EarlyGradient::backward_id, 5),
                          Field(&EarlyGradient::backward_id, 6)));
  EXPECT_THAT(membership.take_from(0), IsEmpty());
  membership.keep({.backward_id = 7});
  membership.prepared(/*outputs_are_watched=*/true);
  EXPECT_THAT(membership.take_from(7), IsEmpty());
}

TEST(BackwardMembershipTest, KnowsABackwardThroughAnIterationThatIsOver) {
  BackwardMembership membership;
  const Preparation first = {.number = 1, .iteration = 1};
  const Preparation second = {.number = 2, .iteration = 1};
  membership.output_reached(first, /*backward_id=*/9);
  EXPECT_EQ(membership.passed_by(9), std::nullopt);
  membership.mark_finished(second, /*may_be_repeated=*/false);
  EXPECT_TRUE(membership.is_finished(first));
  EXPECT_THAT(membership.passed_by(9), Optional(1));
  EXPECT_EQ(membership.passed_by(10), std::nullopt);
}

TEST(BackwardMembershipTest, ABackwardThatMadeAGraphMayBeRepeated) {
  BackwardMembership membership;
  const Preparation preparation = {.number = 1, .iteration = 1};
  membership.mark_finished(preparation, /*may_be_repeated=*/true);
  membership.output_reached(preparation, /*backward_id=*/9);
  EXPECT_EQ(membership.passed_by(9), std::nullopt);
}

}  // namespace backward_membership_test
}  // namespace brigade
