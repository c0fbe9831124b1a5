#include "brigade/comm/streams/streams.h"

#include <chrono>
#include <memory>
#include <stdexcept>
#include <thread>

#include "gtest/gtest.h"

namespace brigade {
namespace streams_test {

using std::chrono::milliseconds;

constexpr milliseconds kNever = std::chrono::minutes(1);

c10::intrusive_ptr<c10::ivalue::Future> pending() {
  return c10::make_intrusive<c10::ivalue::Future>(c10::AnyType::get());
}

TEST(WaitForTest, ReturnsAtOnceIfTheFutureIsComplete) {
  const auto done = pending();
  done->markCompleted(1);
  EXPECT_TRUE(wait_for(*done, milliseconds(0)));
  const auto failed = pending();
  failed->setError(std::make_exception_ptr(std::runtime_error("no disk")));
  EXPECT_TRUE(wait_for(*failed, milliseconds(0)));
}

TEST(WaitForTest, ReturnsWhenAnotherThreadCompletesTheFuture) {
  const auto future = pending();
  std::thread completes([future] {
    std::this_thread::sleep_for(milliseconds(20));
    future->markCompleted(1);
  });
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_TRUE(wait_for(*future, kNever));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kNever / 2);
  completes.join();
}

TEST(WaitForTest, ReturnsFalseAtTheTimeout) {
  const auto future = pending();
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_FALSE(wait_for(*future, milliseconds(20)));
  EXPECT_GE(std::chrono::steady_clock::now() - begin, milliseconds(20));
  future->markCompleted(1);  // runs the callback of the wait
  EXPECT_TRUE(wait_for(*future, milliseconds(0)));
}

}  // namespace streams_test
}  // namespace brigade
