#include "brigade/comm/streams/futures.h"

#include <chrono>
#include <memory>
#include <stdexcept>
#include <thread>

#include "gtest/gtest.h"

namespace brigade {
namespace futures_test {

using std::chrono::milliseconds;

constexpr milliseconds kNever = std::chrono::minutes(1);

c10::intrusive_ptr<c10::ivalue::Future> pending() {
  return c10::make_intrusive<c10::ivalue::Future>(c10::AnyType::get());
}

TEST(WaitForTest, AFutureThatIsDoneIsNotWaitedFor) {
  const auto done = pending();
  done->markCompleted(1);
  EXPECT_TRUE(wait_for(*done, milliseconds(0)));
  const auto failed = pending();
  failed->setError(std::make_exception_ptr(std::runtime_error("no disk")));
  EXPECT_TRUE(wait_for(*failed, milliseconds(0)));
}

TEST(WaitForTest, EndsWhenAnotherThreadCompletesTheFuture) {
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

TEST(WaitForTest, EndsAtTheTimeAndTheFutureMayBeDoneLater) {
  const auto future = pending();
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_FALSE(wait_for(*future, milliseconds(20)));
  EXPECT_GE(std::chrono::steady_clock::now() - begin, milliseconds(20));
  future->markCompleted(1);  // calls what the wait has left behind
  EXPECT_TRUE(wait_for(*future, milliseconds(0)));
}

}  // namespace futures_test
}  // namespace brigade
