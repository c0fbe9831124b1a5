#include "brigade/tests/support/simulated_device/stream_test.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <map>
#include <mutex>
#include <thread>

#include "brigade/comm/backends/end_on_own_thread.h"
#include "brigade/tests/support/simulated_device/simulation.h"

namespace brigade::simulated {
namespace {

c10::impl::VirtualGuardImpl guard() {
  return c10::impl::VirtualGuardImpl(kDeviceType);
}

// First number of the tests' streams; beyond all others.
constexpr c10::StreamId kFirstStream = 1000;

// Streams of tests. Each test starts with the first again: the detector is
// faster with fewer streams.
class TestStreams {
 public:
  c10::Stream next(int device_index) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return c10::Stream(c10::Stream::UNSAFE, device(device_index),
                       kFirstStream + num_given_[device_index]++);
  }

  void take_back() {
    const std::lock_guard<std::mutex> lock(mutex_);
    num_given_.clear();
  }

 private:
  std::mutex mutex_;
  std::map<int, c10::StreamId> num_given_;  // guarded by mutex_; by device
};

TestStreams& test_streams() {
  static TestStreams streams;
  return streams;
}

}  // namespace

c10::Device device(int index) {
  return {kDeviceType, static_cast<c10::DeviceIndex>(index)};
}

at::TensorOptions on_device(at::ScalarType dtype, int index) {
  return at::TensorOptions(dtype).device(device(index));
}

c10::Stream default_stream(int device_index) {
  return guard().getDefaultStream(device(device_index));
}

c10::Stream new_stream(int device_index) {
  return test_streams().next(device_index);
}

c10::Stream current_stream_of(int device_index) {
  return guard().getStream(device(device_index));
}

void make_wait(const c10::Stream& waiter, const c10::Stream& stream) {
  if (waiter == stream) return;
  c10::Event event(kDeviceType);
  event.record(stream);
  event.block(waiter);
}

void synchronize_all() {
  for (c10::DeviceIndex d = 0; d < guard().deviceCount(); ++d) {
    guard().synchronizeDevice(d);
  }
}

std::vector<Race> take_races() {
  // Process groups may still be ending on other threads, which wait for
  // streams.
  while (num_ending_values > 0) std::this_thread::yield();
  // Completes copies, which may report races.
  synchronize_all();
  test_streams().take_back();
  return Simulation::get().take_races();
}

void expect_no_races() {
  for (const Race& race : take_races()) ADD_FAILURE() << race.text;
}

}  // namespace brigade::simulated
