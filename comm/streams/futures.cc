#include "brigade/comm/streams/futures.h"

#include <ATen/core/List.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "brigade/comm/streams/streams.h"

namespace brigade {
namespace {

// One per device: futures are asked for in the order of their collectives.
c10::Stream waiting_stream(c10::Device device) {
  static std::mutex mutex;
  static std::unordered_map<c10::Device, c10::Stream> streams;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = streams.find(device);
  if (found != streams.end()) return found->second;
  return streams.emplace(device, side_stream(device)).first->second;
}

}  // namespace

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
  const c10::StreamGuard beside(waiting_stream(tensor.device()));
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
