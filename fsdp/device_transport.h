// Gathers and sums on a device, by collectives of its backend.
//
// Each kind has groups of its own, so that it has a stream of its own there: a
// row's for gathers, that of neighbours for those among them, a row's and a
// column's for sums. Sums are the backend's, in its order, and not scaled; or
// those of the ranks' order, as on the CPU: a row's ranks send each other their
// slices, and each adds up what it gets, and so over the column. Over Gloo, as
// where ranks share a device, a row's sum is an all-reduce.

#ifndef BRIGADE_FSDP_DEVICE_TRANSPORT_H_
#define BRIGADE_FSDP_DEVICE_TRANSPORT_H_

#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/fsdp/shard_transport.h"
#include "brigade/fsdp/streams.h"

namespace brigade {

// Collective over the group. `num_shards`, `neighbours`: as
// make_ordered_transport()'s. `streams`: what it is launched on, of a device
// that the group's backend for it serves. `in_order`: of the ranks, for which
// each sum takes memory of its `whole` once more. Errors: as make_subgroup().
std::unique_ptr<ShardTransport> make_device_transport(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, int num_shards,
    const ShardingStreams& streams, const std::vector<int>& neighbours = {},
    bool in_order = false);

}  // namespace brigade

#endif  // BRIGADE_FSDP_DEVICE_TRANSPORT_H_
