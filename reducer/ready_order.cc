#include "brigade/reducer/ready_order.h"

#include <ATen/ops/tensor.h>

#include <utility>

#include "brigade/comm/group/group_info.h"

namespace brigade {

void ReadyOrder::agree(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  if (stage_ == Stage::kAgreed) return;
  const std::vector<int64_t> mine(order_.begin(), order_.end());
  std::vector<at::Tensor> tensors = {
      at::tensor(mine, at::kLong).to(control_device(*group))};
  group->broadcast(tensors)->wait();
  const at::Tensor agreed = tensors.front().cpu();
  const int64_t* begin = agreed.const_data_ptr<int64_t>();
  order_.assign(begin, begin + agreed.numel());
  stage_ = Stage::kAgreed;
}

}  // namespace brigade
