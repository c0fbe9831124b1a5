#include "brigade/fsdp/sharding_streams.h"

#include <algorithm>

#include "brigade/comm/streams/streams.h"

namespace brigade {

StreamPoint StreamPoint::of(std::span<const c10::Stream> streams) {
  StreamPoint point;
  if (streams.empty()) return point;
  std::vector<std::pair<c10::Stream, c10::Event>> events;
  for (const c10::Stream& stream : streams) {
    events.emplace_back(stream, c10::Event(stream.device_type()))
        .second.record(stream);
  }
  point.events_ = std::make_shared<const decltype(events)>(std::move(events));
  return point;
}

StreamPoint StreamPoint::now(c10::Device device) {
  if (device.is_cpu() || device.is_meta()) return {};
  const c10::Stream stream = current_stream(device);
  return of({&stream, 1});
}

void StreamPoint::wait() const {
  if (!events_) return;
  for (const auto& [stream, event] : *events_) {
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
  for (const c10::Stream& stream : streams_) {
    if (stream != waiting) StreamPoint::of({&stream, 1}).wait();
  }
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
  if (device.is_cpu() || device.is_meta()) return std::nullopt;
  return side_stream(device);
}

ShardingStreams::ShardingStreams(c10::Device device)
    : device_(device),
      gathers_(stream_beside_the_program(device)),
      sums_(stream_beside_the_program(device)) {}

}  // namespace brigade
