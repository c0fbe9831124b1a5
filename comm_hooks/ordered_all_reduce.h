// The ordered all-reduce of a group: on the CPU
// comm/ordered/ordered_collectives.h, whose connections are made when they are
// first needed; on devices comm/ordered/ordered_on_device.h.
//
// Thread safety: one call at a time.

#ifndef BRIGADE_COMM_HOOKS_ORDERED_ALL_REDUCE_H_
#define BRIGADE_COMM_HOOKS_ORDERED_ALL_REDUCE_H_

#include <ATen/core/Tensor.h>

#include <optional>
#include <span>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "brigade/comm/group/channel_identity.h"
#include "brigade/comm/ordered/ordered_collectives.h"
#include "brigade/comm/ordered/ordered_on_device.h"
#include "brigade/comm_hooks/group_reference.h"

namespace brigade {

class OrderedAllReduce {
 public:
  // `row_size`: OrderedOptions::group_size.  Made on all ranks in the same
  // order.  Does not keep the group alive.  Errors: ValueError if `group` is
  // null.
  explicit OrderedAllReduce(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                            std::optional<int> row_size = std::nullopt);

  // Nothing unless some of these are on the CPU. Collective then, where ranks
  // are known to stand in the same place; to be called once at most.  Errors:
  // as OrderedCollectives'.
  void connect_for(std::span<const at::Tensor> tensors);

  // OrderedCollectives::all_reduce(), or that of OrderedOnDevice.  The first
  // call with a tensor on the CPU is collective unless ranks are connected.
  // Errors: as OrderedCollectives' too.
  OrderedCollectives::FuturePtr run(const at::Tensor& tensor, double scale);

 private:
  void connect_as(ChannelIdentity identity);

  const GroupReference group_;
  const std::optional<int> row_size_;
  const ChannelIdentity identity_;
  std::optional<OrderedCollectives> collectives_;
  OrderedOnDevice on_device_;
};

}  // namespace brigade

#endif  // BRIGADE_COMM_HOOKS_ORDERED_ALL_REDUCE_H_
