// Helpers for collectives of a process group: one name for all versions of
// torch, all-gathers of integers, broadcasts of many tensors.
//
// Thread safety: as the group's collectives.

#ifndef BRIGADE_COMM_GROUP_GROUP_COLLECTIVES_H_
#define BRIGADE_COMM_GROUP_GROUP_COLLECTIVES_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace brigade {

// All-gather of a tensor. Returns each rank's; their sizes and dtypes are
// equal. Throws PeerError "rank 1 of 4 <failure>: ..."; `failure` reads "could
// not exchange host ids".
std::vector<at::Tensor> all_gather_tensors(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, const at::Tensor& own,
    const std::string& failure);

// Returns the integers of all ranks, concatenated in rank order. Otherwise as
// all_gather_tensors().
std::vector<int64_t> all_gather_ints(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const std::vector<int64_t>& own, const std::string& failure);

// Collective. Returns a number that is equal on all ranks and new for this
// group, for keys in its store. Throws PeerError.
int64_t channel_number(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

// Collective. Copies the tensors of rank `source`, of any dtype, into every
// rank's, in pieces of at most 250 MiB. If the backend does not block the host,
// the copies are ordered on the current streams.
//
// REQUIRES: equal numbers of elements, dtypes and devices, in the same order,
// on all ranks.
void broadcast_tensors(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                       const std::vector<at::Tensor>& tensors, int source);

// Throws NotImplementedError if `error` says that a backend has no all-to-all
// for tensors of this device.
void throw_if_not_supported(const c10::Error& error, c10::Device device);

// All-gather: output [W * S] from each rank's input [S]. `input` may be this
// rank's slice of `output`.
template <typename ProcessGroup>
c10::intrusive_ptr<c10d::Work> all_gather_into(ProcessGroup& group,
                                               at::Tensor output,
                                               at::Tensor input) {
  if constexpr (requires { group.all_gather_single(output, input); }) {
    return group.all_gather_single(output, input);
  } else {
    return group._allgather_base(output, input);
  }
}

// Reduce-scatter: output [S] of the sum of each rank's input [W * S].
template <typename ProcessGroup>
c10::intrusive_ptr<c10d::Work> reduce_scatter_into(ProcessGroup& group,
                                                   at::Tensor output,
                                                   at::Tensor input) {
  if constexpr (requires { group.reduce_scatter_single(output, input); }) {
    return group.reduce_scatter_single(output, input);
  } else {
    return group._reduce_scatter_base(output, input);
  }
}

// All-to-all of W slices of equal size. Throws NotImplementedError if the group
// has none.
template <typename ProcessGroup>
c10::intrusive_ptr<c10d::Work> all_to_all_into(ProcessGroup& group,
                                               at::Tensor output,
                                               at::Tensor input) {
  std::vector<int64_t> equal;
  try {
    if constexpr (requires {
                    group.all_to_all_single(output, input, equal, equal);
                  }) {
      return group.all_to_all_single(output, input, equal, equal);
    } else {
      return group.alltoall_base(output, input, equal, equal);
    }
  } catch (const c10::Error& error) {
    throw_if_not_supported(error, input.device());
    throw;
  }
}

// Makes the current stream wait for the collective. Does not block the host,
// even if Work::wait() does. Throws the collective's error.
inline void wait_on_current_stream(const c10::intrusive_ptr<c10d::Work>& work) {
  work->getFuture()->waitAndThrow();
}

}  // namespace brigade

#endif  // BRIGADE_COMM_GROUP_GROUP_COLLECTIVES_H_
