// Makes sure, before a reducer is made, that a module can be trained in
// parallel: alone, beside its local replicas, and across ranks.

#ifndef BRIGADE_DDP_MODULE_CHECK_H_
#define BRIGADE_DDP_MODULE_CHECK_H_

#include <span>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "absl/status/status.h"
#include "brigade/ddp/module_tensors.h"

namespace brigade {

// Collective. Checked here and not by the reducer, so that a frozen or missing
// parameter is told apart from one that merely has another place among the
// trainable ones. `local_status`: what this rank has found wrong before.
//
// Errors: ValueError on every rank alike, if there is no group, a rank's status
// is not OK, a replica has other tensors than the first, nothing is to be
// trained, or ranks differ.
void verify_modules(std::span<const ModuleTensors> replicas,
                    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                    absl::Status local_status);

}  // namespace brigade

#endif  // BRIGADE_DDP_MODULE_CHECK_H_
