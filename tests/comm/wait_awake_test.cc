#include "brigade/comm/wait_awake.h"

#include <thread>

#include "gtest/gtest.h"

namespace brigade {
namespace {

using c10::ivalue::Future;

constexpr auto kNever = std::chrono::steady_clock::time_point::max();

c10::intrusive_ptr<Future> make_future() {
  return c10::make_intrusive<Future>(c10::NoneType::get());
}

TEST(WaitAwakeTest, ReturnsAtOnceIfNothingIsToBeWaitedFor) {
  const auto future = make_future();
  future->markCompleted(c10::IValue());
  wait_awake(*future, kNever);
}

TEST(WaitAwakeTest, ReturnsWhenAnotherThreadCompletesIt) {
  const auto future = make_future();
  std::thread network([&] { future->markCompleted(c10::IValue()); });
  wait_awake(*future, kNever);
  EXPECT_TRUE(future->completed());
  network.join();
}

TEST(WaitAwakeTest, LeavesAtTheDeadlineWhatIsNotDone) {
  const auto future = make_future();
  wait_awake(*future, std::chrono::steady_clock::now());
  EXPECT_FALSE(future->completed());
}

}  // namespace
}  // namespace brigade
