// The all-reduce of a group in rank order: of CPU tensors by
// OrderedCollectives, of device tensors with the same bits by an all-to-all of
// slices, a local sum and an all-gather, on a stream of this object's own. The
// host does not wait.
//
// Thread safety: one call at a time, in the same order on all ranks.

#ifndef BRIGADE_COMM_HOOKS_ORDERED_ALL_REDUCE_H_
#define BRIGADE_COMM_HOOKS_ORDERED_ALL_REDUCE_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <map>
#include <optional>
#include <span>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "brigade/comm/ordered/ordered_collectives.h"
#include "brigade/comm_hooks/hook_traits.h"

namespace brigade {

class OrderedAllReduce {
 public:
  using FuturePtr = OrderedCollectives::FuturePtr;

  // Made on all ranks in the same order. Does not keep the group alive. Errors:
  // ValueError if `group` is null.
  explicit OrderedAllReduce(const c10::intrusive_ptr<c10d::ProcessGroup>& group)
      : group_(group, "OrderedAllReduce") {}

  // Collective, at the same place of all ranks' programs; at most once. Errors:
  // as OrderedCollectives'.
  void connect();

  // The same if some of these are on the CPU.
  void connect_for(std::span<const at::Tensor> tensors);

  // Replaces `tensor` [any shape] by the sum over ranks, times `scale`. The
  // future holds a list of it. The first call with a tensor on the CPU is
  // collective unless ranks are connected.
  //
  // On a device, `tensor` is contiguous and of real or complex numbers, and all
  // memory is taken before the first launch: up to twice the tensor's size and
  // four times 1/W of it.
  //
  // Errors: as OrderedCollectives'; on a device OutOfMemoryError, and nothing
  // is launched then; what the backend throws.
  FuturePtr run(const at::Tensor& tensor, double scale);

 private:
  const GroupReference group_;
  std::optional<OrderedCollectives> collectives_;
  std::map<c10::DeviceIndex, c10::Stream> streams_;
};

}  // namespace brigade

#endif  // BRIGADE_COMM_HOOKS_ORDERED_ALL_REDUCE_H_
