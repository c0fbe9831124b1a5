// A group's collectives for shards, under either name that versions of torch
// give them.

#ifndef BRIGADE_FSDP_GROUP_COLLECTIVES_H_
#define BRIGADE_FSDP_GROUP_COLLECTIVES_H_

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace brigade {

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

}  // namespace brigade

#endif  // BRIGADE_FSDP_GROUP_COLLECTIVES_H_
