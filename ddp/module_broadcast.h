// Copies the values of a module's tensors: from one rank to all, and from one
// local replica to another.
//
// Thread safety: one call at a time.

#ifndef BRIGADE_DDP_MODULE_BROADCAST_H_
#define BRIGADE_DDP_MODULE_BROADCAST_H_

#include <span>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "brigade/ddp/module_tensors.h"

namespace brigade {

// Collective: afterwards every rank has the values of rank `source`. `what`
// names the tensors in errors. A world of 1 communicates nothing.
//
// Errors: PeerError if the network fails.
void broadcast_from(int source, std::span<const NamedTensor> tensors,
                    const char* what,
                    const c10::intrusive_ptr<c10d::ProcessGroup>& group);

// REQUIRES: both list the same tensors of the same module, in other replicas.
void copy_values(std::span<const NamedTensor> from,
                 std::span<const NamedTensor> to);

}  // namespace brigade

#endif  // BRIGADE_DDP_MODULE_BROADCAST_H_
