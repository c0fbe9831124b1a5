#include "brigade/fsdp/streams/stream_uses.h"

#include <algorithm>
#include <iterator>

#include "brigade/comm/streams/stream_join.h"

namespace brigade {

bool StreamUses::note() {
  return !device_.is_cpu() && !device_.is_meta() &&
         note(current_stream(device_));
}

bool StreamUses::note(const c10::Stream& stream) {
  if (std::ranges::find(streams_, stream) != streams_.end()) return false;
  streams_.push_back(stream);
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

}  // namespace brigade
