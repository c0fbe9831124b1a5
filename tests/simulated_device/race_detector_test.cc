#include "brigade/tests/support/simulated_device/race_detector.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade::simulated {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr RaceDetector::Address kMemory = 0x1000;
constexpr size_t kBytes = 64;

// Two streams and an allocation of the first one.
class RaceDetectorTest : public ::testing::Test {
 protected:
  RaceDetectorTest() { detector_.allocate(kMemory, kBytes, a_); }

  void write(size_t stream, size_t begin = 0, size_t bytes = kBytes) {
    detector_.run(stream, "write",
                  {{.begin = kMemory + begin, .bytes = bytes, .writes = true}});
  }

  void read(size_t stream, size_t begin = 0, size_t bytes = kBytes) {
    detector_.run(stream, "read", {{.begin = kMemory + begin, .bytes = bytes}});
  }

  // `waiter` waits for the work of `stream`.
  void order(size_t stream, size_t waiter) {
    detector_.wait(waiter, detector_.moment(stream));
  }

  void expect_no_races() {
    for (const Race& race : detector_.take_races()) ADD_FAILURE() << race.text;
  }

  void expect_one(Race::Kind kind) {
    const std::vector<Race> races = detector_.take_races();
    ASSERT_EQ(races.size(), 1);
    EXPECT_EQ(races[0].kind, kind) << races[0].text;
  }

  RaceDetector detector_;
  const size_t a_ = detector_.add_stream("a");
  const size_t b_ = detector_.add_stream("b");
};

TEST_F(RaceDetectorTest, AReadRacesWithAWriteOfAnotherStream) {
  write(a_);
  read(b_);
  expect_one(Race::kUnordered);
}

TEST_F(RaceDetectorTest, AWriteRacesWithAReadOfAnotherStream) {
  read(a_);
  write(b_);
  expect_one(Race::kUnordered);
}

TEST_F(RaceDetectorTest, ReadsDoNotRaceWithReads) {
  read(a_);
  read(b_);
  expect_no_races();
}

TEST_F(RaceDetectorTest, AnEventOrdersOnlyWorkBeforeItsRecord) {
  const RaceDetector::Moment too_early = detector_.moment(a_);
  write(a_);
  detector_.wait(b_, too_early);
  read(b_);
  expect_one(Race::kUnordered);
}

TEST_F(RaceDetectorTest, AnEventDoesNotOrderEarlierWorkOfItsWaiter) {
  read(b_);
  order(a_, b_);
  write(a_);
  expect_one(Race::kUnordered);
}

TEST_F(RaceDetectorTest, AHostWaitOrdersLaterLaunches) {
  write(a_);
  detector_.host_waits(detector_.moment(a_));
  read(b_);
  expect_no_races();
}

TEST_F(RaceDetectorTest, PartsOfAWriteAreTrackedSeparately) {
  write(a_);
  order(a_, b_);
  write(b_, 16, 16);
  read(a_, 0, 16);
  read(a_, 32, 32);
  expect_no_races();
  read(a_, 31, 1);
  expect_one(Race::kUnordered);
}

TEST_F(RaceDetectorTest, AReportNamesBothSidesAndTheRemedy) {
  write(a_);
  read(b_);
  EXPECT_EQ(detector_.take_races().at(0).text,
            "race: 'read' (operation 2) on b reads memory that 'write' "
            "(operation 1) on a writes (byte 0 of allocation 1 of 64 bytes), "
            "and no event orders them.\nRecord an event on a and make b wait "
            "for it.");
}

TEST_F(RaceDetectorTest, UseOfFreedMemoryIsARace) {
  detector_.free(kMemory);
  read(a_);
  expect_one(Race::kUseAfterFree);
}

TEST_F(RaceDetectorTest, AFreeRacesWithAUseOnAnotherStream) {
  read(b_);
  detector_.free(kMemory);
  expect_one(Race::kEarlyFree);
}

TEST_F(RaceDetectorTest, MemoryIsReusedAfterItsRecordedUses) {
  detector_.record_use(kMemory, b_);
  read(b_);
  const RaceDetector::Moment last_use = detector_.free(kMemory);
  EXPECT_FALSE(detector_.may_serve(a_, last_use));
  order(b_, a_);
  EXPECT_TRUE(detector_.may_serve(a_, last_use));
}

TEST_F(RaceDetectorTest, UsesOfReallocatedMemoryFollowTheAllocation) {
  write(a_);
  detector_.free(kMemory);
  detector_.allocate(kMemory, kBytes, a_);
  write(b_);
  expect_one(Race::kUnordered);
  detector_.free(kMemory);
  detector_.take_races();
  detector_.allocate(kMemory, kBytes, a_);
  detector_.wait(b_, detector_.moment(a_));
  write(b_);
  expect_no_races();
}

}  // namespace
}  // namespace brigade::simulated
