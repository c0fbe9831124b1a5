#include "brigade/comm/streams/streams.h"

#include <ATen/core/List.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <unordered_map>

namespace brigade {
namespace {

bool has_streams(c10::Device device) {
  return !device.is_cpu() && !device.is_meta();
}

// One per device suffices: callers ask for futures in launch order.
c10::Stream waiting_stream(c10::Device device) {
  static std::mutex mutex;
  static std::unordered_map<c10::Device, c10::Stream> streams;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = streams.find(device);
  if (found != streams.end()) return found->second;
  return streams.emplace(device, side_stream(device)).first->second;
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

bool StreamUses::add_current() {
  if (!has_streams(device_) || has_current()) return false;
  streams_.push_back(current_stream(device_));
  return true;
}

bool StreamUses::has_current() const {
  return !streams_.empty() &&
         std::ranges::find(streams_, current_stream(device_)) != streams_.end();
}

bool StreamUses::wait() const {
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

c10::intrusive_ptr<c10::ivalue::Future> completed_future(
    const std::vector<at::Tensor>& tensors) {
  std::vector<c10::Device> devices;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.is_cpu() || std::ranges::count(devices, tensor.device()) > 0) {
      continue;
    }
    devices.push_back(tensor.device());
  }
  auto done = c10::make_intrusive<c10::ivalue::Future>(
      c10::ListType::create(c10::TensorType::get()), std::move(devices));
  done->markCompleted(c10::List<at::Tensor>(tensors));
  return done;
}

c10::intrusive_ptr<c10::ivalue::Future> future_of(
    const c10::intrusive_ptr<c10d::Work>& work, const at::Tensor& tensor) {
  if (tensor.is_cpu() || tensor.layout() != at::kStrided) {
    return work->getFuture();
  }
  const c10::StreamGuard on_other_stream(waiting_stream(tensor.device()));
  return work->getFuture();
}

bool wait_for(c10::ivalue::Future& future, std::chrono::milliseconds timeout) {
  struct Signal {  // outlives a wait that has timed out
    std::mutex mutex;
    std::condition_variable changed;
    bool is_done = false;  // guarded by mutex
  };
  if (future.completed()) return true;
  const auto signal = std::make_shared<Signal>();
  future.addCallback(
      [signal](c10::ivalue::Future&) {
        const std::lock_guard<std::mutex> lock(signal->mutex);
        signal->is_done = true;
        signal->changed.notify_all();
      },
      /*uses_future=*/false);
  std::unique_lock<std::mutex> lock(signal->mutex);
  return signal->changed.wait_for(lock, timeout,
                                  [&] { return signal->is_done; });
}

}  // namespace brigade
