#include "brigade/ddp/module_broadcast.h"

#include <c10/core/GradMode.h>

#include <exception>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/group/group_collectives.h"

namespace brigade {

void broadcast_from(int source, std::span<const NamedTensor> tensors,
                    const char* what,
                    const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  std::vector<at::Tensor> to_send;
  to_send.reserve(tensors.size());
  for (const NamedTensor& named : tensors) to_send.push_back(named.tensor);
  try {
    broadcast_tensors(group, to_send, source);
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
