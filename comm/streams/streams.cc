#include "brigade/comm/streams/streams.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

namespace brigade {
namespace {

bool has_streams(c10::Device device) {
  return !device.is_cpu() && !device.is_meta();
}

}  // namespace

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

c10::Stream side_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type())
      .getStreamFromGlobalPool(device, /*isHighPriority=*/true);
}

std::optional<c10::Stream> side_stream_if_any(c10::Device device) {
  if (!has_streams(device)) return std::nullopt;
  return side_stream(device);
}

void record_use(const at::Tensor& memory) {
  if (!has_streams(memory.device())) return;
  memory.record_stream(current_stream(memory.device()));
}

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
  if (!has_streams(device)) return {};
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
  if (!has_streams(device_) || has_current()) return false;
  streams_.push_back(current_stream(device_));
  return true;
}

bool StreamUses::has_current() const {
  return !streams_.empty() &&
         std::ranges::find(streams_, current_stream(device_)) != streams_.end();
}

bool StreamUses::join() const {
  if (streams_.empty()) return false;
  const c10::Stream waiting = current_stream(device_);
  bool has_others = false;
  for (const c10::Stream& stream : streams_) {
    if (stream == waiting) continue;
    StreamPoint::of({&stream, 1}).wait();
    has_others = true;
  }
  return has_others;
}

StreamPoint StreamUses::end() {
  StreamPoint point = StreamPoint::of(streams_);
  streams_.clear();
  return point;
}

void StreamUses::record_on(const at::Tensor& memory) const {
  for (const c10::Stream& stream : streams_) memory.record_stream(stream);
}

}  // namespace brigade
