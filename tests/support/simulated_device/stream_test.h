// Test fixture and helpers for simulated devices.
//
//   TEST_F(StreamTest, ReadsAfterTheWrite) {
//     const c10::Stream side = new_stream();
//     at::Tensor x = at::ones({4}, on_device());
//     make_wait(side, default_stream());
//     {
//       const c10::StreamGuard on_side(side);
//       x.mul_(2);
//     }
//     make_wait(default_stream(), side);
//     EXPECT_EQ(x.sum().item<double>(), 8);
//   }                       // fails if there was a race
//
// A binary of such tests calls install() in its main.

#ifndef BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_STREAM_TEST_H_
#define BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_STREAM_TEST_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <string>
#include <vector>

#include "brigade/tests/support/simulated_device/race_detector.h"
#include "gtest/gtest.h"

namespace brigade::simulated {

c10::Device device(int index = 0);
at::TensorOptions on_device(at::ScalarType dtype = at::kFloat, int index = 0);

c10::Stream default_stream(int device_index = 0);
// Returns a stream that is new since the last take_races().
c10::Stream new_stream(int device_index = 0);

c10::Stream current_stream_of(int device_index = 0);

// Makes `waiter` wait for the work of `stream` so far.
void make_wait(const c10::Stream& waiter, const c10::Stream& stream);

// Blocks until all streams of all devices are done.
void synchronize_all();

// Returns the races since the last call. Synchronizes all devices, so that
// tests are independent.
std::vector<Race> take_races();

// Fails the current test for each race since the last call.
void expect_no_races();

// Ends with expect_no_races().
class StreamTest : public ::testing::Test {
 protected:
  void TearDown() override { expect_no_races(); }
};

}  // namespace brigade::simulated

#endif  // BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_STREAM_TEST_H_
