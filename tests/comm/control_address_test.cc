#include "brigade/comm/control_address.h"

#include <torch/torch.h>

#include <cstdlib>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "gtest/gtest.h"

namespace brigade {
namespace {

// The environment without GLOO_SOCKET_IFNAME, which would be a choice.
class ControlAddressTest : public ::testing::Test {
 protected:
  ControlAddressTest() {
    if (const char* set = std::getenv(kVariable)) before_ = set;
    unsetenv(kVariable);
  }
  ~ControlAddressTest() override {
    if (before_) setenv(kVariable, before_->c_str(), /*overwrite=*/1);
  }

  static c10::intrusive_ptr<c10d::Store> server() {
    c10d::TCPStoreOptions options;
    options.isServer = true;
    return c10::make_intrusive<c10d::PrefixStore>(
        "prefix", c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options));
  }

  static constexpr const char* kVariable = "GLOO_SOCKET_IFNAME";

 private:
  std::optional<std::string> before_;
};

TEST_F(ControlAddressTest, IsTheOneFromWhichTheStoreIsReached) {
  EXPECT_EQ(control_address(server(), /*rank=*/0, /*world_size=*/1),
            "127.0.0.1");
  EXPECT_EQ(source_address_towards("127.0.0.2"), "127.0.0.1");
  EXPECT_EQ(source_address_towards("no such host."), std::nullopt);
}

TEST_F(ControlAddressTest, OfRanksOnOneMachineIsLoopback) {
  const auto store = server();
  std::string of_rank_1;
  // A client of its own: one that waits for a key is locked.
  std::thread other([&] { of_rank_1 = control_address(store->clone(), 1, 2); });
  EXPECT_EQ(control_address(store, 0, 2), "127.0.0.1");
  other.join();
  EXPECT_EQ(of_rank_1, "127.0.0.1");
}

// Rank 0, which serves the store, reaches it over loopback; its peers are
// elsewhere and have published where.
TEST_F(ControlAddressTest, BesideTheStoreIsTheOneThatReachesThePeers) {
  const auto store = server();
  store->set("address/1", "127.0.0.1");
  store->set("address/2", "unknown");
  EXPECT_EQ(control_address(store, 0, 3), "127.0.0.1");
}

TEST_F(ControlAddressTest, IsLeftToGlooWhereItIsChosenOrUnknown) {
  EXPECT_EQ(control_address(c10::make_intrusive<c10d::HashStore>(), 0, 2), "");
  setenv(kVariable, "lo", /*overwrite=*/1);
  EXPECT_EQ(control_address(server(), 0, 2), "");
  unsetenv(kVariable);
}

TEST_F(ControlAddressTest, KnowsLoopback) {
  EXPECT_TRUE(is_loopback("127.0.1.1"));
  EXPECT_TRUE(is_loopback("::1"));
  EXPECT_FALSE(is_loopback("10.0.0.1"));
}

}  // namespace
}  // namespace brigade
