#include "brigade/ddp/module_broadcast.h"

#include <ATen/ops/view_as_real.h>
#include <c10/core/GradMode.h>

#include <exception>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/comm/peer_error.h"

namespace brigade {
namespace {

// Tensors are broadcast in pieces of this size, so that peak memory stays low.
constexpr size_t kBroadcastBytes = size_t{250} << 20;

}  // namespace

void broadcast_from(int source, std::span<const NamedTensor> tensors,
                    const char* what,
                    const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  if (tensors.empty() || group->getSize() == 1) return;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> to_send;
  to_send.reserve(tensors.size());
  for (const auto& [name, tensor] : tensors) {
    to_send.push_back(tensor.is_complex() ? at::view_as_real(tensor) : tensor);
  }
  try {
    c10d::broadcast_coalesced(group, to_send, kBroadcastBytes, source);
  } catch (...) {
    throw_peer_error(absl::StrCat("DistributedDataParallel: broadcasting ",
                                  tensors.size(), " ", what, " from rank ",
                                  source, " to rank ", group->getRank()),
                     std::current_exception());
  }
}

void copy_values(std::span<const NamedTensor> from,
                 std::span<const NamedTensor> to) {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < from.size(); ++i) {
    at::Tensor target = to[i].tensor;
    target.copy_(from[i].tensor, /*non_blocking=*/true);
  }
}

}  // namespace brigade
