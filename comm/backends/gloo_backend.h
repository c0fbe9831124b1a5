// Makes the backend for CPU tensors.
//
// Decides which network devices Gloo uses (comm/backends/gloo_connections.h),
// and that a peer's death is an error: its threads get no SIGPIPE
// (comm/backends/sigpipe_block.h).

#ifndef BRIGADE_COMM_BACKENDS_GLOO_BACKEND_H_
#define BRIGADE_COMM_BACKENDS_GLOO_BACKEND_H_

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace brigade {

// Connects to every other rank through `store`; all ranks must call it.
//
// Gloo listens on the given network interfaces; if there are none, on those
// that GLOO_SOCKET_IFNAME lists, separated by commas; if that is not set
// either, on the address of this machine's host name, or else on loopback.
//
// Its abort() ends all collectives in flight, here and at the peers, with an
// error, instead of at the timeout.  (A message of which a part has arrived is
// still waited for here.)  Here the error speaks of an "application timeout".
//
// Errors: c10::ValueError for an empty name in GLOO_SOCKET_IFNAME; whatever
// Gloo throws when an interface or a peer can't be found.
c10::intrusive_ptr<c10d::Backend> make_gloo_backend(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
    std::chrono::milliseconds timeout,
    std::vector<std::string> interfaces = {});

// The same among the ranks of `group`, with connections of its own, over the
// network devices (and by the threads) of the group's own Gloo backend if it
// has one.
c10::intrusive_ptr<c10d::Backend> make_gloo_backend_beside(
    c10d::ProcessGroup& group, const c10::intrusive_ptr<c10d::Store>& store,
    std::chrono::milliseconds timeout);

}  // namespace brigade

#endif  // BRIGADE_COMM_BACKENDS_GLOO_BACKEND_H_
