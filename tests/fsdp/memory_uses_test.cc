#include "brigade/fsdp/schedule/memory_uses.h"

#include <cstddef>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace memory_uses_test {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr MemoryUse kUse = {1, 2, Purpose::kBackward};

TEST(UseRecordTest, CountsUsesThatAreAlike) {
  UseRecord record;
  record.begin(kUse, 8);
  record.begin(kUse, 8);
  EXPECT_EQ(record.num_begun(kUse), 2);
  EXPECT_EQ(record.num_begun({1, 2, Purpose::kForward}), 0);
  EXPECT_EQ(record.num_begun({1, 3, Purpose::kBackward}), 0);
  EXPECT_EQ(record.num_begun({7, 0, Purpose::kBackward}), 0);
  record.end_step();
  EXPECT_EQ(record.num_begun(kUse), 0);
}

TEST(UseRecordTest, StepsThatDoTheSameHaveEqualRecords) {
  UseRecord record;
  const auto step = [&] {
    const size_t first = record.begin(kUse, 8);
    const size_t second = record.begin({0, 0, Purpose::kSlice}, 16);
    record.end(second);
    record.end(first);
    return record.end_step();
  };
  const std::vector<RecordedUse> one = step();
  EXPECT_THAT(one,
              ElementsAre(RecordedUse{kUse, {.begin = 0, .end = 3, .bytes = 8}},
                          RecordedUse{{0, 0, Purpose::kSlice},
                                      {.begin = 1, .end = 2, .bytes = 16}}));
  EXPECT_EQ(step(), one);
}

TEST(UseRecordTest, WhatStaysToTheNextStepIsThereAllTheTime) {
  UseRecord record;
  const MemoryUse other = {0, 0, Purpose::kForward};
  record.end(record.begin(other, 8));
  const size_t kept = record.begin(kUse, 8);
  const RecordedUse all_the_time = {kUse, {.begin = 0, .end = 3, .bytes = 8}};
  EXPECT_THAT(
      record.end_step(),
      ElementsAre(RecordedUse{other, {.begin = 0, .end = 1, .bytes = 8}},
                  all_the_time));
  // It stays, behind those that have begun in the step.
  record.end(record.begin(other, 8));
  EXPECT_THAT(
      record.end_step(),
      ElementsAre(RecordedUse{other, {.begin = 0, .end = 1, .bytes = 8}},
                  RecordedUse{kUse, {.begin = 0, .end = 2, .bytes = 8}}));
  // It ends, and another one takes its place.
  record.end(record.begin(other, 8));
  record.end(kept);
  record.begin(kUse, 8);
  EXPECT_THAT(
      record.end_step(),
      ElementsAre(RecordedUse{other, {.begin = 0, .end = 1, .bytes = 8}},
                  all_the_time));
}

TEST(UseRecordTest, AStepWithoutUsesHasWhatIsThere) {
  UseRecord record;
  EXPECT_THAT(record.end_step(), IsEmpty());
  record.begin(kUse, 8);
  record.end_step();
  EXPECT_THAT(
      record.end_step(),
      ElementsAre(RecordedUse{kUse, {.begin = 0, .end = 1, .bytes = 8}}));
}

TEST(UseRecordTest, AStepOfTooManyUsesIsNotRecorded) {
  UseRecord record;
  size_t last = 0;
  for (size_t i = 0; i <= 131'072; ++i) last = record.begin(kUse, 8);
  record.end(last);
  EXPECT_THAT(record.end_step(), IsEmpty());
  record.end(last);
  record.begin(kUse, 8);
  EXPECT_THAT(record.end_step(), SizeIs(1));
}

}  // namespace memory_uses_test
}  // namespace brigade
