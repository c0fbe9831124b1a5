// The sum of a segment's gradients over all ranks, of which each rank gets its
// shard: an entry of the engine's sequence.

#ifndef BRIGADE_FSDP_UNIT_REDUCTION_H_
#define BRIGADE_FSDP_UNIT_REDUCTION_H_

#include <cstddef>
#include <string>

#include "brigade/engine/collective.h"
#include "brigade/fsdp/gradient_memory.h"
#include "brigade/fsdp/segment.h"
#include "brigade/fsdp/shard_transport.h"

namespace brigade {

class UnitReduction final : public Collective {
 public:
  // `index`: among all reductions. `unit_name`: of whose segment it is.
  // REQUIRES: all outlive this object.
  UnitReduction(size_t index, std::string unit_name, Segment& segment,
                ShardTransport& transport, GradientMemory& memory);

  Segment& segment() { return segment_; }
  const Segment& segment() const { return segment_; }

  // What deliver() has left to be multiplied with.
  double scale() const;

  std::optional<size_t> unit() const override { return index_; }
  size_t num_awaited() const override { return segment_.parameters().size(); }
  bool is_left_out() override { return false; }
  bool needs_pack() override { return false; }  // but where it is launched
  void pack() override {}
  c10::intrusive_ptr<c10::ivalue::Future> launch() override;
  c10::intrusive_ptr<c10::ivalue::Future> launch_substitute() override;
  at::Tensor result_of(const c10::IValue& value) override { return {}; }
  void deliver(const at::Tensor& result) override {}
  c10::Device device() const override { return segment_.device(); }
  bool fails_by_network_only() const override { return true; }
  std::string describe() const override;

 private:
  const size_t index_;
  const std::string unit_name_;
  Segment& segment_;
  ShardTransport& transport_;
  GradientMemory& memory_;
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_UNIT_REDUCTION_H_
