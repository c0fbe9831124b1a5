// Makes the backend that carries signatures (comm/signature_channel.h): one
// collective, for small messages, that never waits for anything a lost peer
// would have to do.

#ifndef BRIGADE_COMM_GLOO_SIGNATURE_BACKEND_H_
#define BRIGADE_COMM_GLOO_SIGNATURE_BACKEND_H_

#include <chrono>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace brigade {

// Connects to the other ranks of `group` through `store`; all must call it.
// Uses the first network device of the group's Gloo backend, or, if it has
// none, what GLOO_SOCKET_IFNAME or the host name tells; and one thread, which
// executes operations in order.
//
// Only for _allgather_base() of CPU tensors.  It sends directly to every rank,
// and waits for messages only, not for its own to be sent: Gloo tells a
// receiver that its peer is lost, but forgets a sender whose message was being
// written.  So an operation fails within milliseconds of a peer's death, and
// abort() ends every one.
//
// Errors: whatever Gloo throws when a peer can't be found.
c10::intrusive_ptr<c10d::Backend> make_gloo_signature_backend(
    c10d::ProcessGroup& group, const c10::intrusive_ptr<c10d::Store>& store,
    std::chrono::milliseconds timeout);

}  // namespace brigade

#endif  // BRIGADE_COMM_GLOO_SIGNATURE_BACKEND_H_
