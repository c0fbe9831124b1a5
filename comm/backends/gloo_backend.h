// The Gloo backend for CPU tensors.

#ifndef BRIGADE_COMM_BACKENDS_GLOO_BACKEND_H_
#define BRIGADE_COMM_BACKENDS_GLOO_BACKEND_H_

#include <signal.h>

#include <chrono>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace brigade {

// Collective. Connects to every other rank through `store`, and returns when
// all ranks are connected: each of them may then destroy its backend. SIGPIPE
// is blocked on the backend's threads, so that a peer's death is an error.
//
// Errors: Gloo's, if an interface or a peer can't be found.
c10::intrusive_ptr<c10d::Backend> make_gloo_backend(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
    std::chrono::milliseconds timeout);

// Makes another backend for the ranks of `group`, with its own connections. It
// uses the network devices and the number of threads of the group's own Gloo
// backend, if there is one.
c10::intrusive_ptr<c10d::Backend> make_second_gloo_backend(
    c10d::ProcessGroup& group, const c10::intrusive_ptr<c10d::Store>& store,
    std::chrono::milliseconds timeout);

// Returns true if the group's CPU backend is Gloo's or derived from it.
bool has_gloo_backend(c10d::ProcessGroup& group);

// Returns false if the backend is not Gloo's. Otherwise ends its operations in
// flight and all later ones with an error, here and on the peers.
//
// It forces a timeout, so the error mentions an "application timeout". An
// operation that has received a part of its message still waits for the rest.
bool end_gloo_operations_of(c10d::Backend& backend);

// Blocks SIGPIPE for the calling thread, and for threads that it starts during
// the scope.
//
// A write to a connection that a peer has closed raises SIGPIPE, which ends a
// C++ program (Python ignores it). With the signal blocked, the write fails
// with an error. The destructor discards a SIGPIPE raised during the scope.
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
