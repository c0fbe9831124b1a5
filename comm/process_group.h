// Process groups of all ranks of a launcher, of some (subgroups), or of one.
//
//   int main() {
//     brigade::GroupScope scope(brigade::init_process_group());
//     brigade::DistributedDataParallel model(net, scope.group());
//     ...
//   }

#ifndef BRIGADE_COMM_PROCESS_GROUP_H_
#define BRIGADE_COMM_PROCESS_GROUP_H_

#include <c10/core/Device.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "brigade/comm/backends/device_backend.h"

namespace brigade {

// Device types of c10d's process groups. PrivateUse1: a vendor's.
inline constexpr std::array kDeviceTypes = {
    c10::DeviceType::CPU, c10::DeviceType::CUDA, c10::DeviceType::XPU,
    c10::DeviceType::PrivateUse1};

struct ProcessGroupOptions {
  // kCUDA uses NCCL, other devices need `make_backend`. CPU tensors always use
  // Gloo.
  at::DeviceType device_type = at::kCPU;

  // Makes a vendor's backend, or one that replaces NCCL for kCUDA. Called once
  // on each rank, with its device as the current one.
  MakeBackend make_backend = nullptr;

  // Limit of a collective; c10d's default. A peer's death ends collectives
  // earlier.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);

  // Appears in logs and in this group's keys in the store.
  std::string name = "brigade";
};

// Makes the group of all ranks from the launcher's environment variables. All
// ranks must call it with equal options. torchrun sets all variables; with srun
// or mpirun export MASTER_ADDR (host name of rank 0) and MASTER_PORT (a free
// port there).
//
// Device `local_rank` becomes the current one unless the type is the CPU's.
// Gloo listens on the network interfaces in GLOO_SOCKET_IFNAME ("eth0,eth1"),
// by default on that of the host name, else on loopback. Ranks wait for each
// other for `timeout`, at most 5 minutes. A world of 1 gets
// single_process_group().
//
// Errors: c10::ValueError for a missing or contradictory variable, a bad option
// or a missing device; c10::Error for kCUDA without a GPU or in a build without
// CUDA; exceptions of `make_backend`; PeerError (a c10::DistBackendError) if
// ranks do not connect in time.
c10::intrusive_ptr<c10d::ProcessGroup> init_process_group(
    const ProcessGroupOptions& options = {});

// Collective. Makes a group of the ranks that share `store`. One store may
// serve several groups, if all ranks make them in the same order. Sets the
// store's timeout to the group's. A world of 1 gets real backends too.
//
// With CUDA, set the current device before: from torch 2.15 on the group serves
// that device only.
//
// Errors: as init_process_group(); ValueError if `store` is null.
c10::intrusive_ptr<c10d::ProcessGroup> make_process_group(
    c10::intrusive_ptr<c10d::Store> store, int rank, int world_size,
    const ProcessGroupOptions& options = {});

// Makes a world of 1 without network, store server or threads. Collectives
// complete at once, on the calling thread and its current stream.
c10::intrusive_ptr<c10d::ProcessGroup> single_process_group(
    std::vector<at::DeviceType> device_types = {kDeviceTypes.begin(),
                                                kDeviceTypes.end()});

// Closes a failed group's connections (Gloo's, and those that abort() closes)
// and aborts its ordered collectives. Peers then fail before their timeout.
void close_group(c10d::ProcessGroup& group) noexcept;

// The thread on which GroupScope shuts down a group. A device's backend may
// wait for its peers' shutdown; kOnOwnThread keeps the caller from waiting.
enum class GroupEnd { kHere, kOnOwnThread };

// Shuts down a group at the end of a scope. Declare it before everything that
// uses the group.
//
// Collectives in flight are completed; the program needs no barrier. If an
// exception leaves the scope, they are aborted, here and on the peers. The
// store goes last: on rank 0 it may be the server of all ranks.
//
// Thread safety: none.
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

// Collective over `group`. Makes a subgroup of `ranks` with its own
// connections; `ranks` include this rank and are numbered in the given order,
// equal on all of them. If they are in rising order, errors name ranks of
// `group`. A device's subgroup ends with GroupEnd::kOnOwnThread.
//
// `device`, the only one that the subgroup serves unless it uses Gloo:
//   CPU     Gloo
//   CUDA    NCCL, or Gloo if `group` uses Gloo for it
//   others  the group's ProcessGroupOptions::make_backend
//
// The timeout is the group's. Errors: ValueError if `ranks` lack this rank,
// repeat one or are out of range, or if the group has no store; as
// make_process_group().
GroupScope make_subgroup(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                         const std::vector<int>& ranks,
                         c10::Device device = at::kCPU);

// Collective. Returns the number of ranks per host, for shards within a host.
// Ranks that can't share memory (two containers, two network namespaces) count
// as two hosts.
//
// Errors, on all ranks: ValueError if hosts have different numbers of ranks,
// a host's ranks are not consecutive, or a rank does not know its host;
// PeerError if the exchange fails.
int ranks_of_a_host(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

// `host_by_rank`: at least one element; 0: unknown.
int ranks_of_a_host(const std::vector<int64_t>& host_by_rank);

}  // namespace brigade

#endif  // BRIGADE_COMM_PROCESS_GROUP_H_
