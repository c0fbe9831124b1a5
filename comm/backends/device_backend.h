// Backends that serve one device type in a process group, and the device of
// this rank.

#ifndef BRIGADE_COMM_BACKENDS_DEVICE_BACKEND_H_
#define BRIGADE_COMM_BACKENDS_DEVICE_BACKEND_H_

#include <c10/core/DeviceType.h>

#include <chrono>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace brigade {

// Arguments of a backend's constructor. No other backend uses the store.
struct BackendPlace {
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0;
  int world_size = 1;
  std::chrono::milliseconds timeout;
  std::string group_name;
};

using MakeBackend =
    std::function<c10::intrusive_ptr<c10d::Backend>(const BackendPlace&)>;

// Makes device `local_rank` the calling thread's current one; does nothing for
// the CPU. Errors: ValueError if there is no such device; RuntimeError for CUDA
// in a build without it.
void select_device(c10::DeviceType type, int local_rank);
void select_cuda_device(int local_rank);

// Makes the backend that torch's Python calls "nccl": from torch 2.15 on the
// newer one, which serves only the current device, unless
// TORCH_DIST_USE_NCCL2=0. Communicators are made at the first collective.
//
// Errors: c10::Error without a GPU, or in a build without CUDA.
c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const BackendPlace& place);

// Makes the backend of a world of 1. It completes every collective at once, on
// the calling thread and its current stream, for tensors of any device. It has
// no send and receive. Thread safety: any thread.
c10::intrusive_ptr<c10d::Backend> make_single_process_backend();

// Stores `make`, if any, for the group's subgroups.
void remember_make_backend(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                           c10::DeviceType type, const MakeBackend& make);

// Returns the stored function for this device type, or null.
MakeBackend find_make_backend(const c10d::ProcessGroup& group,
                              c10::DeviceType type);

}  // namespace brigade

#endif  // BRIGADE_COMM_BACKENDS_DEVICE_BACKEND_H_
