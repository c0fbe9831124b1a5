// State of the simulated devices: streams, events, allocations, copies and
// races. Kernels run at once, on the thread that enqueues them; only the order
// of streams is simulated.
//
// Internal to this folder; tests use stream_test.h.
//
// Thread safety: any thread.

#ifndef BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_SIMULATION_H_
#define BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_SIMULATION_H_

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <cstddef>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "brigade/tests/support/simulated_device/race_detector.h"

namespace brigade::simulated {

constexpr c10::DeviceType kDeviceType = c10::DeviceType::PrivateUse1;

// The object that a c10::Event holds.
struct Event {
  c10::Stream recorded_on;
  RaceDetector::Moment moment;
  std::chrono::steady_clock::time_point time;
  int num_queries = 0;
};

// An access of a kernel to a tensor's memory.
struct KernelAccess {
  const void* begin = nullptr;
  size_t bytes = 0;
  bool writes = false;
};

class Simulation {
 public:
  // Makes the devices. Errors: RuntimeError if they exist.
  static void start(int num_devices);

  // Errors: RuntimeError if there are no devices.
  static Simulation& get();

  int num_devices() const { return num_devices_; }

  // Runs `body` as a kernel of `stream`.
  void run(const std::string& name, const c10::Stream& stream,
           const std::vector<KernelAccess>& accesses,
           const std::function<void()>& body);

  // Records that the last kernel of `stream` copied to or from pinned memory.
  // Until the host waits, copied bytes are poison, and source bytes must not
  // change.
  void copied(const c10::Stream& stream, void* host, size_t bytes,
              bool is_to_host);
  bool is_in_use_by_copies(const void* host, size_t bytes) const;

  void record(Event& event, const c10::Stream& stream);
  void wait(const c10::Stream& stream, const Event& event);
  void host_waits(const Event& event);
  void host_waits(const c10::Stream& stream);
  void host_waits(c10::DeviceIndex device);
  bool host_has_waited(const c10::Stream& stream);

  // Returns true if the host has waited for the event, and after many queries.
  bool query(Event& event);

  // Record allocations, uses and frees. `owner` may reuse a freed block when
  // may_serve() returns true.
  void allocated(const void* begin, size_t bytes, const c10::Stream& owner);
  void record_use(const void* begin, const c10::Stream& stream);
  RaceDetector::Moment freed(const void* begin);
  bool may_serve(const c10::Stream& owner, const RaceDetector::Moment& moment);

  std::vector<Race> take_races();

 private:
  struct HostCopy {
    char* host;
    std::string bytes;  // the correct value
    bool is_to_host;
    RaceDetector::Moment done;
  };

  explicit Simulation(int num_devices) : num_devices_(num_devices) {}

  size_t number_of(const c10::Stream& stream);
  void wait_on_host(const RaceDetector::Moment& moment);

  const int num_devices_;
  mutable std::mutex mutex_;
  // Guarded by mutex_.
  RaceDetector detector_;
  std::vector<HostCopy> host_copies_;  // in launch order
  std::map<std::pair<c10::DeviceIndex, c10::StreamId>, size_t> streams_;
};

}  // namespace brigade::simulated

#endif  // BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_SIMULATION_H_
