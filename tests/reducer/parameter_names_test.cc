#include "brigade/reducer/parameter_names.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(ParameterNamesTest, AreNoneAtFirst) {
  const ParameterNames names;
  EXPECT_TRUE(names.empty());
  EXPECT_EQ(names.size(), 0);
  EXPECT_THAT(names.strings(), IsEmpty());
  EXPECT_TRUE(ParameterNames(std::vector<std::string>()).empty());
}

TEST(ParameterNamesTest, AreWhatTheyWereMadeOf) {
  const ParameterNames names = std::vector<std::string>{"weight", "", "bias"};
  EXPECT_EQ(names.size(), 3);
  EXPECT_EQ(names[0], "weight");
  EXPECT_EQ(names[1], "");
  EXPECT_THAT(names.strings(), ElementsAre("weight", "", "bias"));
  EXPECT_THAT(ParameterNames({"a", "b"}).strings(), ElementsAre("a", "b"));
}

TEST(ParameterNamesTest, MayBeSetAnew) {
  ParameterNames names = {"a", "b"};
  names.set(0, "longer");
  names.push_back("c");
  EXPECT_THAT(names.strings(), ElementsAre("longer", "b", "c"));
}

TEST(ParameterNamesTest, CopiesShareUntilOneChanges) {
  ParameterNames names = {"a", "b"};
  ParameterNames copy = names;
  EXPECT_EQ(copy[0].data(), names[0].data());
  names.set(0, "c");
  copy.push_back("d");
  EXPECT_THAT(names.strings(), ElementsAre("c", "b"));
  EXPECT_THAT(copy.strings(), ElementsAre("a", "b", "d"));
}

}  // namespace
}  // namespace brigade
