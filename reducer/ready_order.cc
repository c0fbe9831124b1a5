#include "brigade/reducer/ready_order.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <algorithm>

#include "brigade/comm/control_device.h"

namespace brigade {

std::vector<size_t> ReadyOrder::agree(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  const std::vector<int64_t> mine(observed_.begin(), observed_.end());
  std::vector<at::Tensor> tensors = {
      at::tensor(mine, at::kLong).to(control_device(*group))};
  group->broadcast(tensors)->wait();
  const at::Tensor agreed = tensors.front().cpu();
  const int64_t* begin = agreed.const_data_ptr<int64_t>();
  std::vector<size_t> order(begin, begin + agreed.numel());
  wanted_ = false;
  observed_.clear();
  return order;
}

}  // namespace brigade
