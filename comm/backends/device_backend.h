// The backend that serves the tensors of a device in a process group, and the
// device itself.

#ifndef BRIGADE_COMM_BACKENDS_DEVICE_BACKEND_H_
#define BRIGADE_COMM_BACKENDS_DEVICE_BACKEND_H_

#include <c10/core/DeviceType.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "brigade/comm/backends/backend_place.h"

namespace brigade {

struct ProcessGroupOptions;

// Makes device `local_rank` the calling thread's current one; nothing for the
// CPU. Errors: ValueError if there is no such device; RuntimeError for CUDA in
// a build without it.
void select_device(c10::DeviceType type, int local_rank);
void select_cuda_device(int local_rank);

// Calls `make`. Errors: ValueError if its backend is for another place; what
// `make` throws.
c10::intrusive_ptr<c10d::Backend> make_device_backend(
    const MakeBackend& make, const BackendPlace& place);

// The backend for CUDA tensors that torch's Python calls "nccl": from
// torch 2.15 on the newer one, which serves only the current device, unless
// TORCH_DIST_USE_NCCL2=0. Its communicators are made at the first collective.
//
// Errors: c10::Error when there is no GPU or brigade was built without CUDA.
c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const BackendPlace& place);

// The backend of a world of 1: answers every collective at once, on the calling
// thread and stream, for tensors of any device. Has no send and receive. Thread
// safety: any thread.
c10::intrusive_ptr<c10d::Backend> make_single_process_backend();

// make_process_group(), with Gloo for CPU tensors only if `serves_cpu`.
// Without, ranks meet at the store only, and collectives open the connections
// of the device's backend alone. REQUIRES: `serves_cpu` for the CPU.
c10::intrusive_ptr<c10d::ProcessGroup> connect_process_group(
    c10::intrusive_ptr<c10d::Store> store, int rank, int world_size,
    const ProcessGroupOptions& options, bool serves_cpu);

// For the group's subgroups.
void remember_make_backend(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                           c10::DeviceType type, const MakeBackend& make);

// Null unless it was remembered for this type.
MakeBackend find_make_backend(const c10d::ProcessGroup& group,
                              c10::DeviceType type);

}  // namespace brigade

#endif  // BRIGADE_COMM_BACKENDS_DEVICE_BACKEND_H_
