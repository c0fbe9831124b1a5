#include "brigade/comm/control/control_address.h"

#include <torch/torch.h>

#include <cstdlib>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "brigade/comm/backends/gloo_connections.h"
#include "brigade/comm/process_group.h"
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
    unsetenv(kVariable);
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
  EXPECT_EQ(control_address(server()), "127.0.0.1");
  EXPECT_EQ(source_address_towards("127.0.0.2"), "127.0.0.1");
  EXPECT_EQ(source_address_towards("no such host."), std::nullopt);
}

TEST_F(ControlAddressTest, IsLeftToGlooWhereItIsChosenOrUnknown) {
  EXPECT_EQ(control_address(c10::make_intrusive<c10d::HashStore>()), "");
  setenv(kVariable, "lo", /*overwrite=*/1);
  EXPECT_EQ(control_address(server()), "");
}

TEST_F(ControlAddressTest, OfGlooIsWhereItListens) {
  const auto group =
      make_process_group(c10::make_intrusive<c10d::HashStore>(), /*rank=*/0,
                         /*world_size=*/1, {.gloo_interfaces = {"lo"}});
  EXPECT_EQ(gloo_address_of(*group), "127.0.0.1");
  EXPECT_EQ(gloo_address_of(*single_process_group()), "");
  setenv(kVariable, "lo", /*overwrite=*/1);
  EXPECT_EQ(default_gloo_address(), "127.0.0.1");
}

TEST_F(ControlAddressTest, KnowsLoopback) {
  EXPECT_TRUE(is_loopback("127.0.1.1"));
  EXPECT_TRUE(is_loopback("::1"));
  EXPECT_FALSE(is_loopback("10.0.0.1"));
}

}  // namespace
}  // namespace brigade
