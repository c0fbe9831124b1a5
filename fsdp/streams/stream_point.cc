#include "brigade/fsdp/streams/stream_point.h"

#include <c10/core/Event.h>

#include <utility>
#include <vector>

#include "brigade/comm/streams/stream_join.h"

namespace brigade {

struct StreamPoint::Events {
  struct Recorded {
    c10::Stream stream;
    c10::Event event;
  };
  std::vector<Recorded> recorded;
};

StreamPoint StreamPoint::of(std::span<const c10::Stream> streams) {
  StreamPoint point;
  if (streams.empty()) return point;
  auto events = std::make_shared<Events>();
  for (const c10::Stream& stream : streams) {
    c10::Event event(stream.device_type());
    event.record(stream);
    events->recorded.push_back({.stream = stream, .event = std::move(event)});
  }
  point.events_ = std::move(events);
  return point;
}

StreamPoint StreamPoint::now(c10::Device device) {
  if (device.is_cpu()) return {};
  const c10::Stream stream = current_stream(device);
  return of({&stream, 1});
}

void StreamPoint::wait() const {
  if (!events_) return;
  for (const auto& [stream, event] : events_->recorded) {
    const c10::Stream waiting = current_stream(stream.device());
    if (waiting != stream) event.block(waiting);
  }
}

}  // namespace brigade
