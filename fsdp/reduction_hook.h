// Comm hooks of sharding: run between a unit's whole gradient and the sum of
// its shard.
//
//   FullyShardOptions options;
//   options.comm_hook = compression_hook(at::kHalf);  // travels in float16
//
// Without a hook the sum is a reduce-scatter in the reduce dtype. A hook of
// one's own runs on every rank for the same units in the same order, also, on
// zeros, for units that a rank has not used:
//
//   class Clipped : public ReductionHook {
//     FuturePtr reduce(const Reduction& reduction) override {
//       reduction.whole.clamp_(-1, 1);
//       return reduction.sum(reduction.whole, reduction.shard);
//     }
//     std::string hook_name() const override { return "clipped"; }
//   };
//
// Thread safety: one call at a time.

#ifndef BRIGADE_FSDP_REDUCTION_HOOK_H_
#define BRIGADE_FSDP_REDUCTION_HOOK_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

namespace brigade {

class ReductionHook {
 public:
  using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

  // Of F ranks that hold S elements each.
  struct Reduction {
    std::string unit;  // its name
    size_t index = 0;  // of the unit, identical on all ranks
    at::Tensor whole;  // 1D, [F * S]: this rank's gradients; may be written to
    at::Tensor shard;  // 1D, [S], of the same dtype: gets the sum
    int rank = 0;      // of F: its slice of `whole` becomes `shard`

    // Writes into its second argument [S] this rank's slice of the scaled sum
    // over all ranks of its first [F * S], of any one floating dtype.
    std::function<FuturePtr(const at::Tensor& whole, const at::Tensor& shard)>
        sum = {};
  };

  virtual ~ReductionHook() = default;

  // Writes the scaled sum into `shard`, by `sum` once. `whole` and `shard` are
  // its own until the future is complete. On devices with streams it launches
  // on the current one, and the future is complete when it is returned. Other
  // collectives are of groups that nobody else uses, identical on all ranks.
  // Throws before it has launched any; an exception ends the iteration.
  virtual FuturePtr reduce(const Reduction& reduction) = 0;

  // For messages; compared across ranks.
  virtual std::string hook_name() const = 0;

  // Whether reduce() and its future fail by the network only.
  virtual bool fails_by_network_only() const { return false; }
};

// Gradients travel and are summed in `wire_dtype`, over a row of the mesh and
// over its column, in the order of the ranks (rounding:
// comm/ordered/ordered_collectives.h). They are kept, and accumulated on this
// rank, in the reduce dtype. Takes no memory beside the gradients'. Complex
// gradients, and those whose elements are not longer than the wire's, travel as
// they are.
//
// Errors: ValueError unless `wire_dtype` is float16 or bfloat16.
std::shared_ptr<ReductionHook> compression_hook(at::ScalarType wire_dtype);

}  // namespace brigade

#endif  // BRIGADE_FSDP_REDUCTION_HOOK_H_
