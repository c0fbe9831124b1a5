#include "brigade/tests/support/simulated_device/host_copies.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace brigade::simulated {
namespace {

constexpr int kHostPoison = 0xDB;

}  // namespace

void HostCopies::to_host(char* host, size_t bytes, RaceDetector::Moment done,
                         std::string name) {
  copies_.push_back({.host = host,
                     .bytes = std::string(host, bytes),
                     .is_to_host = true,
                     .done = std::move(done),
                     .name = std::move(name)});
  std::memset(host, kHostPoison, bytes);
}

void HostCopies::from_host(char* host, size_t bytes, RaceDetector::Moment done,
                           std::string name) {
  copies_.push_back({.host = host,
                     .bytes = std::string(host, bytes),
                     .is_to_host = false,
                     .done = std::move(done),
                     .name = std::move(name)});
}

void HostCopies::finish(RaceDetector& detector, size_t host) {
  std::erase_if(copies_, [&](const Copy& copy) {
    if (!detector.host_has_waited(copy.done, host)) return false;
    if (copy.is_to_host) {
      std::memcpy(copy.host, copy.bytes.data(), copy.bytes.size());
    } else if (std::memcmp(copy.host, copy.bytes.data(), copy.bytes.size()) !=
               0) {
      detector.report(
          {.kind = Race::kHostWrite,
           .text = "host write: pinned memory changed before '" + copy.name +
                   "' had read it.\nWait for the copy, or use other memory."});
    }
    return true;
  });
}

bool HostCopies::is_in_use(const char* host, size_t bytes) const {
  return std::any_of(copies_.begin(), copies_.end(), [&](const Copy& copy) {
    return copy.host < host + bytes && host < copy.host + copy.bytes.size();
  });
}

}  // namespace brigade::simulated
