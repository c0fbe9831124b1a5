#include "brigade/reducer/device_times.h"

#include <map>

#include "brigade/reducer/steady_time.h"
#include "brigade/reducer/stream_join.h"

namespace brigade {
namespace {

// One point in time on both clocks.
struct Anchor {
  c10::Event event;
  int64_t time_ns = 0;
};

Anchor make_anchor(c10::Device device) {
  Anchor anchor = {
      .event = c10::Event(device.type(), c10::EventFlag::BACKEND_DEFAULT)};
  anchor.event.record(current_stream(device));
  anchor.event.synchronize();
  anchor.time_ns = now_ns();
  return anchor;
}

int64_t elapsed_ns(const c10::Event& from, const c10::Event& to) {
  return static_cast<int64_t>(from.elapsedTime(to) * 1e6);
}

}  // namespace

void DeviceTimes::restart(size_t num_buckets) {
  const std::lock_guard<std::mutex> lock(mutex_);
  by_bucket_.resize(num_buckets);
  for (Steps& steps : by_bucket_) steps = {};
}

void DeviceTimes::record(size_t bucket, Step step, c10::Device device) {
  if (!device.is_cuda()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  std::optional<c10::Event>& event = by_bucket_[bucket][step];
  event.emplace(device.type(), c10::EventFlag::BACKEND_DEFAULT);
  event->record(current_stream(device));
}

void DeviceTimes::resolve(std::vector<BucketTimes>& buckets) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::map<c10::DeviceIndex, Anchor> anchors;
  for (size_t b = 0; b < by_bucket_.size(); ++b) {
    for (size_t step = 0; step < by_bucket_[b].size(); ++step) {
      const std::optional<c10::Event>& event = by_bucket_[b][step];
      if (!event) continue;
      event->synchronize();
      const c10::Device device = event->device();
      auto anchor = anchors.find(device.index());
      if (anchor == anchors.end()) {
        anchor = anchors.emplace(device.index(), make_anchor(device)).first;
      }
      const int64_t time_ns =
          anchor->second.time_ns - elapsed_ns(*event, anchor->second.event);
      switch (static_cast<Step>(step)) {
        case kPackBegin:
          buckets[b].pack_begin_ns = time_ns;
          break;
        case kPackEnd:
          buckets[b].pack_end_ns = time_ns;
          break;
        case kLaunch:
          buckets[b].launch_ns = time_ns;
          break;
        case kComplete:
          buckets[b].complete_ns = time_ns;
          break;
      }
    }
  }
}

}  // namespace brigade
