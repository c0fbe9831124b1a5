// A group's collectives for slices, under either name that versions of torch
// give them, and what waits for one.

#ifndef BRIGADE_COMM_GROUP_GROUP_COLLECTIVES_H_
#define BRIGADE_COMM_GROUP_GROUP_COLLECTIVES_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace brigade {

// Throws NotImplementedError if `error` says that a backend has no all-to-all
// for tensors of this device.
void throw_if_not_supported(const c10::Error& error, c10::Device device);

// [W * S] from [S] of each rank; `input` may be its own part of `output`.
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

// [S] of the sum of [W * S] of each rank.
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

// All-to-all of slices, by rank: of equal lengths unless these are given.
// Errors: NotImplementedError if the group has none.
template <typename ProcessGroup>
c10::intrusive_ptr<c10d::Work> exchange_parts(
    ProcessGroup& group, at::Tensor output, at::Tensor input,
    std::vector<int64_t> received = {}, std::vector<int64_t> sent = {}) {
  try {
    if constexpr (requires {
                    group.all_to_all_single(output, input, received, sent);
                  }) {
      return group.all_to_all_single(output, input, received, sent);
    } else {
      return group.alltoall_base(output, input, received, sent);
    }
  } catch (const c10::Error& error) {
    throw_if_not_supported(error, input.device());
    throw;
  }
}

// The current stream waits, the host does not, whatever Work::wait() does.
// Errors: what the collective failed with.
inline void join_current_stream(const c10::intrusive_ptr<c10d::Work>& work) {
  work->getFuture()->waitAndThrow();
}

}  // namespace brigade

#endif  // BRIGADE_COMM_GROUP_GROUP_COLLECTIVES_H_
