#include "brigade/comm/streams/completed_future.h"

#include <ATen/core/List.h>

#include <algorithm>
#include <utility>

namespace brigade {

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

}  // namespace brigade
