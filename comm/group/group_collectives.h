// Collectives of a process group under one name for all versions of torch, and
// collectives of small numbers and of many tensors.
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

// Collective. Returns the `own` numbers of all ranks, in rank order: the same
// count on each. `doing`: for errors, "could not tell the others its host".
// Throws PeerError if ranks don't meet.
std::vector<int64_t> numbers_of_ranks(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const std::vector<int64_t>& own, const std::string& doing);

// Collective. Returns a number, equal on all ranks, that the group's earlier
// calls have not returned: for keys in its store. Throws PeerError.
int64_t channel_number(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

// Collective. Copies the tensors of rank `source`, complex ones too, into every
// rank's, in pieces of at most 250 MiB. Ends before it returns where the
// backend blocks the host, otherwise in the order of the current streams.
// Communicates nothing in a world of 1.
//
// REQUIRES: the same numbers of elements, dtypes and devices, in the same
// order, on all ranks.
void broadcast_tensors(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                       const std::vector<at::Tensor>& tensors, int source);

// Throws NotImplementedError if `error` says that a backend has no all-to-all
// for tensors of this device.
void throw_if_not_supported(const c10::Error& error, c10::Device device);

// All-gather: [W * S] from [S] of each rank; `input` may be its own part of
// `output`.
template <typename ProcessGroup>
c10::intrusive_ptr<c10d::Work> gather_into(ProcessGroup& group,
                                           at::Tensor output,
                                           at::Tensor input) {
  if constexpr (requires { group.all_gather_single(output, input); }) {
    return group.all_gather_single(output, input);
  } else {
    return group._allgather_base(output, input);
  }
}

// Reduce-scatter: [S] of the sum of [W * S] of each rank.
template <typename ProcessGroup>
c10::intrusive_ptr<c10d::Work> reduce_into(ProcessGroup& group,
                                           at::Tensor output,
                                           at::Tensor input) {
  if constexpr (requires { group.reduce_scatter_single(output, input); }) {
    return group.reduce_scatter_single(output, input);
  } else {
    return group._reduce_scatter_base(output, input);
  }
}

// All-to-all of slices of equal lengths, by rank. Throws NotImplementedError if
// the group has none.
template <typename ProcessGroup>
c10::intrusive_ptr<c10d::Work> exchange_parts(ProcessGroup& group,
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

// Makes the current stream wait for the collective; does not block the host,
// whatever Work::wait() does. Throws the collective's error.
inline void join_current_stream(const c10::intrusive_ptr<c10d::Work>& work) {
  work->getFuture()->waitAndThrow();
}

}  // namespace brigade

#endif  // BRIGADE_COMM_GROUP_GROUP_COLLECTIVES_H_
