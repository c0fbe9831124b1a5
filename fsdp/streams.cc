#include "brigade/fsdp/streams.h"

#include <c10/core/Event.h>

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

#include "brigade/comm/streams/streams.h"

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

bool StreamUses::note() {
  if (device_.is_cpu() || device_.is_meta() || has_current()) return false;
  streams_.push_back(current_stream(device_));
  return true;
}

bool StreamUses::has_current() const {
  return !streams_.empty() &&
         std::ranges::find(streams_, current_stream(device_)) != streams_.end();
}

void StreamUses::join() const {
  if (streams_.empty()) return;
  const c10::Stream waiting = current_stream(device_);
  std::vector<c10::Stream> others;
  std::ranges::copy_if(
      streams_, std::back_inserter(others),
      [&](const c10::Stream& stream) { return stream != waiting; });
  StreamPoint::of(others).wait();
}

StreamPoint StreamUses::end() {
  StreamPoint point = StreamPoint::of(streams_);
  streams_.clear();
  return point;
}

void StreamUses::record_on(const at::Tensor& memory) const {
  for (const c10::Stream& stream : streams_) memory.record_stream(stream);
}

std::optional<c10::Stream> stream_beside_the_program(c10::Device device) {
  if (device.is_cpu()) return std::nullopt;
  return side_stream(device);
}

ShardingStreams::ShardingStreams(c10::Device device)
    : device_(device),
      gathers_(stream_beside_the_program(device)),
      sums_(stream_beside_the_program(device)) {}

}  // namespace brigade
