// A mesh of signatures over connections of Gloo's: every rank sends its message
// straight to every other one.
//
// Not Gloo's own all-gather: when a peer dies while this rank's message to it
// is being written, Gloo's send waits for its timeout, and nothing ends it
// sooner.  A mesh waits for receipt only, which a closed connection ends at
// once.  Internal to comm/.

#ifndef BRIGADE_COMM_GLOO_SIGNATURE_MESH_H_
#define BRIGADE_COMM_GLOO_SIGNATURE_MESH_H_

#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "brigade/comm/signature_mesh.h"

namespace brigade {

// Collective over `store`: all ranks connect, and have said hello when it
// returns.  Uses the network devices of the group's own Gloo backend; else one
// that this process shares among its meshes, at the address that
// comm/control_address.h chooses.  Errors: what Gloo and the store throw.
std::shared_ptr<SignatureMesh> connect_gloo_mesh(
    c10d::ProcessGroup& group, const c10::intrusive_ptr<c10d::Store>& store,
    std::string prefix, std::chrono::milliseconds timeout);

}  // namespace brigade

#endif  // BRIGADE_COMM_GLOO_SIGNATURE_MESH_H_
