// Makes the backend for CUDA tensors: the one that torch's Python calls "nccl"
// (see nccl2_backend.h).
//
// nccl_backend.cc does, nccl_backend_unavailable.cc says that this build can't;
// CMake chooses one of them.

#ifndef BRIGADE_COMM_BACKENDS_NCCL_BACKEND_H_
#define BRIGADE_COMM_BACKENDS_NCCL_BACKEND_H_

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace brigade {

// Makes CUDA device `local_rank` the calling thread's current one.
//
// Errors: c10::ValueError when this machine has no such device; c10::Error when
// brigade was built without CUDA.
void select_cuda_device(int local_rank);

// Communicators are made at the first collective: one per device used or, by a
// backend that is bound to a device (it says so), one for the device that was
// current here.
//
// Errors: c10::Error when there is no GPU or brigade was built without CUDA.
c10::intrusive_ptr<c10d::Backend> make_nccl_backend(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
    std::chrono::milliseconds timeout, const std::string& group_name);

}  // namespace brigade

#endif  // BRIGADE_COMM_BACKENDS_NCCL_BACKEND_H_
