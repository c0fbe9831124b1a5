// Makes the newer of torch's two NCCL backends, which serves one device.
//
// Decides where it is used: where torch's Python makes it for "nccl", from
// torch 2.15 on unless TORCH_DIST_USE_NCCL2=0.  nccl2_backend.cc makes it,
// nccl2_backend_unavailable.cc stands in for older versions; CMake chooses one
// of them.

#ifndef BRIGADE_COMM_BACKENDS_NCCL2_BACKEND_H_
#define BRIGADE_COMM_BACKENDS_NCCL2_BACKEND_H_

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace brigade {

// For the calling thread's current CUDA device.  Its communicator is made at
// the first collective.  Null where the older backend is to be used.
c10::intrusive_ptr<c10d::Backend> make_nccl2_backend(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
    std::chrono::milliseconds timeout, const std::string& group_name);

}  // namespace brigade

#endif  // BRIGADE_COMM_BACKENDS_NCCL2_BACKEND_H_
