#include "brigade/comm/ordered/host_relays.h"

#include <algorithm>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace host_relays_test {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(HostRelaysTest, RanksOfOneHostNeedNone) {
  const HostRelays relays(1, {0, 0, 0});
  EXPECT_THAT(relays.receivers(), IsEmpty());
  EXPECT_THAT(relays.origins_of(2), IsEmpty());
}

TEST(HostRelaysTest, RanksThatAreAloneSendToAll) {
  const HostRelays relays(1, {0, 1, 2, 3});
  EXPECT_THAT(relays.receivers(), ElementsAre(2, 3, 0));
  EXPECT_THAT(relays.origins_of(2), ElementsAre(0, 1, 3));
}

TEST(HostRelaysTest, RanksOfAHostTakeTurns) {
  const std::vector<int> hosts = {0, 1, 0, 1, 0, 5};
  EXPECT_THAT(HostRelays(0, hosts).receivers(), ElementsAre(1, 5));
  EXPECT_THAT(HostRelays(2, hosts).receivers(), ElementsAre(3, 5));
  EXPECT_THAT(HostRelays(4, hosts).receivers(), ElementsAre(5, 1));
  EXPECT_THAT(HostRelays(3, hosts).receivers(), ElementsAre(5, 2));
  EXPECT_THAT(HostRelays(5, hosts).receivers(), ElementsAre(0, 1));
  EXPECT_THAT(HostRelays(5, hosts).origins_of(1), ElementsAre(0, 4, 5));
  EXPECT_THAT(HostRelays(5, hosts).origins_of(3), ElementsAre(2));
  EXPECT_THAT(HostRelays(5, hosts).origins_of(4), IsEmpty());
}

// Whatever hosts there are.
TEST(HostRelaysTest, EachRanksComesToEachOtherHostOnce) {
  for (int draw = 0; draw < 200; ++draw) {
    const int size = 2 + draw % 7;
    std::vector<int> hosts;
    for (int rank = 0; rank < size; ++rank) {
      hosts.push_back(draw * (rank + 3) * 7919 % (1 + draw % 4));
    }
    for (int origin = 0; origin < size; ++origin) {
      const HostRelays own(origin, hosts);
      std::vector<int> reached;
      for (int rank = 0; rank < size; ++rank) {
        const auto& origins = own.origins_of(rank);
        const bool receives = std::ranges::count(own.receivers(), rank) == 1;
        EXPECT_EQ(std::ranges::count(origins, origin), receives ? 1 : 0);
        if (receives) reached.push_back(hosts[rank]);
      }
      std::vector<int> others = hosts;
      std::erase(others, hosts[origin]);
      std::ranges::sort(others);
      others.erase(std::ranges::unique(others).begin(), others.end());
      std::ranges::sort(reached);
      EXPECT_EQ(reached, others);
    }
  }
}

}  // namespace host_relays_test
}  // namespace brigade
