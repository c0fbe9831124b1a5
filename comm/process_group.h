// Makes the process group that a training program hands to its reducer: Gloo
// for CPU tensors, NCCL for CUDA, the caller's backend for other devices.
// torchrun, srun or mpirun start the processes.
//
//   int main() {
//     brigade::GroupScope scope(brigade::init_process_group());
//     brigade::DistributedDataParallel model(net, scope.group());
//     ...
//   }

#ifndef BRIGADE_COMM_PROCESS_GROUP_H_
#define BRIGADE_COMM_PROCESS_GROUP_H_

#include <array>
#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "brigade/comm/backends/backend_place.h"

namespace brigade {

// Devices whose tensors c10d hands to a group's backends. PrivateUse1: the one
// that a vendor has registered.
inline constexpr std::array kDeviceTypes = {
    c10::DeviceType::CPU, c10::DeviceType::CUDA, c10::DeviceType::XPU,
    c10::DeviceType::PrivateUse1};

struct ProcessGroupOptions {
  // kCPU: Gloo for CPU tensors. kCUDA: NCCL for CUDA tensors. Another one
  // (kXPU, kPrivateUse1, ...): the backend of `make_backend` for its tensors.
  at::DeviceType device_type = at::kCPU;

  // Makes a vendor's backend, or one in place of NCCL's for kCUDA. Called once
  // on each rank, with its device the current one.
  MakeBackend make_backend = nullptr;

  // How long a collective may take before it fails; c10d's default. A peer that
  // dies is noticed at once either way.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);

  // Appears in logs, and in the keys that this group writes to the store.
  std::string name = "brigade";
};

// Makes the group of all ranks from the launcher's environment variables. All
// ranks must call it, with equal options. torchrun sets all of them; with srun
// or mpirun export MASTER_ADDR, the host name of rank 0, and MASTER_PORT, a
// free port of it.
//
// Device `local_rank` of a type that is not the CPU's becomes the current one.
// Gloo listens on the network interfaces that GLOO_SOCKET_IFNAME lists
// ("eth0,eth1"); by default on that of the host name. Ranks wait for each other
// for `timeout`, 5 minutes at most. A world of 1 gets single_process_group().
//
// Errors: c10::ValueError for a missing or contradictory variable, a bad option
// or a missing device; c10::Error for kCUDA without a GPU or in a build without
// CUDA; what `make_backend` throws; PeerError (a c10::DistBackendError) when
// ranks do not meet in time.
c10::intrusive_ptr<c10d::ProcessGroup> init_process_group(
    const ProcessGroupOptions& options = {});

// Collective: makes the group of the ranks that meet at `store`, of which it
// uses a part of its own (getStore()): several groups may be made from one
// store, by all ranks in the same order. `store` gets `timeout` for its own. A
// world of 1 gets real backends too.
//
// With CUDA, make this rank's device the current one before: from torch 2.15 on
// the group serves only that one.
//
// Errors: as init_process_group(); ValueError if `store` is null.
c10::intrusive_ptr<c10d::ProcessGroup> make_process_group(
    c10::intrusive_ptr<c10d::Store> store, int rank, int world_size,
    const ProcessGroupOptions& options = {});

// Makes a world of 1, without network, store server or threads. Collectives are
// answered at once, on the caller's thread and stream.
c10::intrusive_ptr<c10d::ProcessGroup> single_process_group(
    std::vector<at::DeviceType> device_types = {kDeviceTypes.begin(),
                                                kDeviceTypes.end()});

// Where a group ends that has not failed. kApart: on a thread of its own, for a
// device's backend, which may wait there for peers that end theirs later.
enum class GroupEnd { kHere, kApart };

// Ends a group when the scope is left. Declare it before everything that uses
// the group, so that it goes last.
//
// On the normal way out, collectives in flight are finished; no barrier is
// needed. When an exception leaves the scope, they are aborted, here and on the
// peers. The store goes last; on rank 0 it may be the server of all.
//
// Thread safety: none; main's own thread.
class GroupScope {
 public:
  explicit GroupScope(c10::intrusive_ptr<c10d::ProcessGroup> group,
                      GroupEnd end = GroupEnd::kHere);
  ~GroupScope();
  GroupScope(const GroupScope&) = delete;
  GroupScope& operator=(const GroupScope&) = delete;

  const c10::intrusive_ptr<c10d::ProcessGroup>& group() const { return group_; }

 private:
  const int exceptions_at_entry_;
  const GroupEnd end_;
  // The group is destroyed before its store.
  c10::intrusive_ptr<c10d::Store> store_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
};

}  // namespace brigade

#endif  // BRIGADE_COMM_PROCESS_GROUP_H_
