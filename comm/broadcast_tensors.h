// Broadcasts many tensors in few collectives.

#ifndef BRIGADE_COMM_BROADCAST_TENSORS_H_
#define BRIGADE_COMM_BROADCAST_TENSORS_H_

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace brigade {

// Collective: afterwards every rank's `tensors` hold the values of rank
// `source`, complex ones too. Small ones travel together, in pieces of at most
// 250 MiB, so that peak memory stays low. Returns once the collectives have
// ended where the backend keeps its host waiting, else once they are launched
// behind the current streams, which wait for them. A world of 1 communicates
// nothing.
//
// REQUIRES: the same numbers of elements, dtypes and devices, in the same
// order, on all ranks.
// Thread safety: as that of the group's collectives.
void broadcast_tensors(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                       const std::vector<at::Tensor>& tensors, int source);

}  // namespace brigade

#endif  // BRIGADE_COMM_BROADCAST_TENSORS_H_
