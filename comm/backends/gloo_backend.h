// The Gloo backend for CPU tensors.
//
// Gloo listens on the network interfaces that GLOO_SOCKET_IFNAME lists,
// separated by commas; by default on the address of this machine's host name,
// or else on loopback.

#ifndef BRIGADE_COMM_BACKENDS_GLOO_BACKEND_H_
#define BRIGADE_COMM_BACKENDS_GLOO_BACKEND_H_

#include <signal.h>

#include <chrono>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace brigade {

// Collective: connects to every other rank through `store`. Its threads get no
// SIGPIPE, so that a peer's death is an error.
//
// Errors: Gloo's, when an interface or a peer can't be found.
c10::intrusive_ptr<c10d::Backend> make_gloo_backend(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
    std::chrono::milliseconds timeout);

// The same among the ranks of `group`, with connections of its own, over the
// network devices (and the threads) of the group's own Gloo backend if it has
// one.
c10::intrusive_ptr<c10d::Backend> make_gloo_backend_beside(
    c10d::ProcessGroup& group, const c10::intrusive_ptr<c10d::Store>& store,
    std::chrono::milliseconds timeout);

// Returns true if the group's backend for the CPU is Gloo's, or derived from
// it.
bool has_gloo_backend(c10d::ProcessGroup& group);

// If the backend is Gloo's, ends all operations in flight with an error, here
// and at the peers, and later ones: lets a wait time out, so that the error
// speaks of an "application timeout". (A message of which a part has arrived is
// still waited for here.) Otherwise returns false.
bool end_gloo_operations_of(c10d::Backend& backend);

// Blocks SIGPIPE for the calling thread and for threads that it starts
// meanwhile.
//
// Gloo's writes to a connection that a peer has closed raise SIGPIPE, which
// ends a C++ program (Python ignores it). With the signal blocked, the write
// fails with an error; a SIGPIPE raised meanwhile is discarded at the end.
class SigpipeBlock {
 public:
  SigpipeBlock();
  ~SigpipeBlock();
  SigpipeBlock(const SigpipeBlock&) = delete;
  SigpipeBlock& operator=(const SigpipeBlock&) = delete;

 private:
  sigset_t before_;
  bool was_pending_;
};

}  // namespace brigade

#endif  // BRIGADE_COMM_BACKENDS_GLOO_BACKEND_H_
