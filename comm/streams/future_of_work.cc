#include "brigade/comm/streams/future_of_work.h"

#include <c10/core/StreamGuard.h>

#include <mutex>
#include <unordered_map>

#include "brigade/comm/streams/side_stream.h"

namespace brigade {
namespace {

// One per device: futures come in the order of their collectives.
c10::Stream waiting_stream(c10::Device device) {
  static std::mutex mutex;
  static std::unordered_map<c10::Device, c10::Stream> streams;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = streams.find(device);
  if (found != streams.end()) return found->second;
  return streams.emplace(device, side_stream(device)).first->second;
}

}  // namespace

c10::intrusive_ptr<c10::ivalue::Future> future_of(
    const c10::intrusive_ptr<c10d::Work>& work, const at::Tensor& tensor) {
  if (tensor.is_cpu() || tensor.layout() != at::kStrided) {
    return work->getFuture();
  }
  const c10::StreamGuard beside(waiting_stream(tensor.device()));
  return work->getFuture();
}

}  // namespace brigade
