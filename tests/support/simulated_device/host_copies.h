// Copies between pinned host memory and a device that the host has not waited
// for. What the host would get then shows: bytes that are to come are poison
// until it waits, and bytes that are still to be read must not have changed.
//
// Thread safety: none; the simulation's lock covers it.

#ifndef BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_HOST_COPIES_H_
#define BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_HOST_COPIES_H_

#include <cstddef>
#include <string>
#include <vector>

#include "brigade/tests/support/simulated_device/race_detector.h"

namespace brigade::simulated {

class HostCopies {
 public:
  // The device has written `bytes` bytes at `host`; `done` lies behind that.
  void to_host(char* host, size_t bytes, RaceDetector::Moment done,
               std::string name);
  // The device has read them.
  void from_host(char* host, size_t bytes, RaceDetector::Moment done,
                 std::string name);

  // Ends those that the host has waited for. Reports changed bytes.
  void finish(RaceDetector& detector, size_t host);

  // One of them reads or writes there.
  bool is_in_use(const char* host, size_t bytes) const;

 private:
  struct Copy {
    char* host;
    std::string bytes;  // the right ones
    bool is_to_host;
    RaceDetector::Moment done;
    std::string name;
  };

  std::vector<Copy> copies_;  // by the time they were enqueued
};

}  // namespace brigade::simulated

#endif  // BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_HOST_COPIES_H_
