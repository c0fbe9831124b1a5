#include "brigade/comm/broadcast_tensors.h"

#include <ATen/ops/view_as_real.h>
#include <c10/core/GradMode.h>

#include <cstddef>
#include <torch/csrc/distributed/c10d/comm.hpp>

namespace brigade {
namespace {

constexpr size_t kPieceBytes = size_t{250} << 20;

}  // namespace

void broadcast_tensors(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                       const std::vector<at::Tensor>& tensors, int source) {
  if (tensors.empty() || group->getSize() == 1) return;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> sent;
  sent.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    sent.push_back(tensor.is_complex() ? at::view_as_real(tensor) : tensor);
  }
  c10d::broadcast_coalesced(group, sent, kPieceBytes, source);
}

}  // namespace brigade
