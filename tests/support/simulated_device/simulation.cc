#include "brigade/tests/support/simulated_device/simulation.h"

#include <c10/util/Backtrace.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "brigade/tests/support/simulated_device/ordering_calls.h"

namespace brigade::simulated {
namespace {

constexpr int kHostPoison = 0xDB;

// An event completes after this many queries even if the host does not wait.
constexpr int kQueriesUntilDone = 1000;

Simulation* simulation = nullptr;

std::string backtrace() {
  static const bool is_wanted =
      std::getenv("SIMULATED_DEVICE_BACKTRACES") != nullptr;
  return is_wanted ? c10::get_backtrace(/*frames_to_skip=*/3,
                                        /*maximum_number_of_frames=*/40)
                   : std::string();
}

RaceDetector::Address address_of(const void* pointer) {
  return reinterpret_cast<RaceDetector::Address>(pointer);
}

}  // namespace

void Simulation::start(int num_devices) {
  TORCH_CHECK(simulation == nullptr,
              "simulated device: the devices exist already.\nCall install() "
              "once in a process.");
  simulation = new Simulation(num_devices);
}

Simulation& Simulation::get() {
  TORCH_CHECK(
      simulation != nullptr,
      "simulated device: there are no devices.\nCall install() before any "
      "backward.");
  return *simulation;
}

size_t Simulation::number_of(const c10::Stream& stream) {
  const std::pair key(stream.device_index(), stream.id());
  const auto known = streams_.find(key);
  if (known != streams_.end()) return known->second;
  const std::string name =
      stream.id() == 0
          ? c10::str("the default stream of ", stream.device())
          : c10::str("stream ", stream.id(), " of ", stream.device());
  return streams_[key] = detector_.add_stream(name);
}

void Simulation::run(const std::string& name, const c10::Stream& stream,
                     const std::vector<KernelAccess>& accesses,
                     const std::function<void()>& body) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<Access> uses;
    uses.reserve(accesses.size());
    for (const KernelAccess& access : accesses) {
      uses.push_back({.begin = address_of(access.begin),
                      .bytes = access.bytes,
                      .writes = access.writes});
    }
    detector_.run(number_of(stream), name, uses, backtrace());
  }
  body();
}

void Simulation::copied(const c10::Stream& stream, void* host, size_t bytes,
                        bool is_to_host) {
  const std::lock_guard<std::mutex> lock(mutex_);
  char* const begin = static_cast<char*>(host);
  host_copies_.push_back({.host = begin,
                          .bytes = std::string(begin, bytes),
                          .is_to_host = is_to_host,
                          .done = detector_.moment(number_of(stream))});
  if (is_to_host) std::memset(begin, kHostPoison, bytes);
}

bool Simulation::is_in_use_by_copies(const void* host, size_t bytes) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const char* const begin = static_cast<const char*>(host);
  return std::ranges::any_of(host_copies_, [&](const HostCopy& copy) {
    return copy.host < begin + bytes && begin < copy.host + copy.bytes.size();
  });
}

void Simulation::record(Event& event, const c10::Stream& stream) {
  if (is_dropped({.kind = OrderingCall::kRecord, .stream = stream})) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  event = {.recorded_on = stream,
           .moment = detector_.moment(number_of(stream)),
           .time = std::chrono::steady_clock::now()};
}

void Simulation::wait(const c10::Stream& stream, const Event& event) {
  if (is_dropped({.kind = OrderingCall::kWait,
                  .stream = stream,
                  .other = event.recorded_on})) {
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  detector_.wait(number_of(stream), event.moment);
}

void Simulation::wait_on_host(const RaceDetector::Moment& moment) {
  detector_.host_waits(moment);
  std::erase_if(host_copies_, [&](const HostCopy& copy) {
    if (!detector_.host_has_waited(copy.done)) return false;
    if (copy.is_to_host) {
      std::memcpy(copy.host, copy.bytes.data(), copy.bytes.size());
    } else if (std::memcmp(copy.host, copy.bytes.data(), copy.bytes.size()) !=
               0) {
      detector_.report(
          {.kind = Race::kHostWrite,
           .text = "host write: pinned memory changed before a copy had read "
                   "it.\nWait for the copy, or use other memory."});
    }
    return true;
  });
}

void Simulation::host_waits(const Event& event) {
  if (is_dropped(
          {.kind = OrderingCall::kHostWait, .stream = event.recorded_on})) {
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  wait_on_host(event.moment);
}

void Simulation::host_waits(const c10::Stream& stream) {
  if (is_dropped({.kind = OrderingCall::kHostWait, .stream = stream})) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  wait_on_host(detector_.moment(number_of(stream)));
}

void Simulation::host_waits(c10::DeviceIndex device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [key, number] : streams_) {
    if (key.first == device) wait_on_host(detector_.moment(number));
  }
}

bool Simulation::host_has_waited(const c10::Stream& stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return detector_.host_has_waited(detector_.moment(number_of(stream)));
}

bool Simulation::query(Event& event) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (detector_.host_has_waited(event.moment)) return true;
  if (++event.num_queries < kQueriesUntilDone) return false;
  wait_on_host(event.moment);
  return true;
}

void Simulation::allocated(const void* begin, size_t bytes,
                           const c10::Stream& owner) {
  const std::lock_guard<std::mutex> lock(mutex_);
  detector_.allocate(address_of(begin), bytes, number_of(owner));
}

void Simulation::record_use(const void* begin, const c10::Stream& stream) {
  if (is_dropped({.kind = OrderingCall::kRecordUse, .stream = stream})) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  detector_.record_use(address_of(begin), number_of(stream));
}

RaceDetector::Moment Simulation::freed(const void* begin) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return detector_.free(address_of(begin), backtrace());
}

bool Simulation::may_serve(const c10::Stream& owner,
                           const RaceDetector::Moment& moment) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return detector_.may_serve(number_of(owner), moment);
}

std::vector<Race> Simulation::take_races() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return detector_.take_races();
}

}  // namespace brigade::simulated
