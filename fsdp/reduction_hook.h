// What happens between a unit's whole gradient and its shard's sum: a comm hook
// of sharding.
//
//   FullyShardOptions options;
//   options.comm_hook = compression_hook(at::kHalf);  // travels in float16
//
// Without a hook the sum is the transport's reduce-scatter, in the reduce
// dtype. One of one's own is run on every rank, for the same units in the same
// order, also for units that a rank has not used, of zeros:
//
//   class Clipped : public ReductionHook {
//     FuturePtr reduce(ShardTransport& transport,
//                      const Reduction& reduction) override {
//       reduction.whole.clamp_(-1, 1);
//       return transport.reduce_scatter(reduction.whole, reduction.shard,
//                                       reduction.sum);
//     }
//     std::string hook_name() const override { return "clipped"; }
//   };
//
// Thread safety: one call at a time.

#ifndef BRIGADE_FSDP_REDUCTION_HOOK_H_
#define BRIGADE_FSDP_REDUCTION_HOOK_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <memory>
#include <string>

#include "brigade/fsdp/shard_transport.h"

namespace brigade {

class ReductionHook {
 public:
  using FuturePtr = ShardTransport::FuturePtr;

  // Of F ranks that hold S elements each.
  struct Reduction {
    at::Tensor whole;  // 1D, [F * S]: this rank's gradients; may be written to
    at::Tensor shard;  // 1D, [S], of the same dtype: gets the sum
    ShardTransport::Sum sum;
  };

  virtual ~ReductionHook() = default;

  // Writes into `shard` this rank's slice of the sum, times its scale. `whole`
  // and `shard` are its own until the future is complete. On devices with
  // streams all is launched behind the current one, and the future is complete
  // when it is returned.
  //
  // Calls the transport, or collectives of groups that nobody else uses, equal
  // ones on all ranks; the transport adds what a row has summed before
  // (Sum::of_row) if it is given `sum`; who sums without it adds that to the
  // row's sum. What it throws ends the iteration, and is to be thrown
  // before it has launched any. Where the transport does not scale, gradients
  // are scaled before, and the scale is 1.
  virtual FuturePtr reduce(ShardTransport& transport,
                           const Reduction& reduction) = 0;

  // Has a name for messages, by which ranks are compared.
  virtual std::string hook_name() const = 0;

  // Whether what goes wrong in reduce() or its future is the network's doing.
  virtual bool fails_by_network_only() const { return false; }
};

// Gradients travel, and are added up, in `wire_dtype`, over a row of the mesh
// and over its column; they are kept, and added up on this rank, in the reduce
// dtype. In the order of the ranks, and rounded as
// comm/ordered/ordered_collectives.h says: on the way, over each row, and over
// the column. The sum over a row is not scaled before it travels on. Takes no
// memory beside the gradients': what travels lies in front of what it was made
// of. Gradients whose elements are not longer than the wire's, or are no real
// numbers, travel as they are.
//
// Errors: ValueError unless `wire_dtype` is float16 or bfloat16.
std::shared_ptr<ReductionHook> compression_hook(at::ScalarType wire_dtype);

}  // namespace brigade

#endif  // BRIGADE_FSDP_REDUCTION_HOOK_H_
