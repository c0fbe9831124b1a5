// The sum of a segment's gradients over all ranks, of which each rank gets its
// shard: an entry of the engine's sequence.

#ifndef BRIGADE_FSDP_UNITS_UNIT_REDUCTION_H_
#define BRIGADE_FSDP_UNITS_UNIT_REDUCTION_H_

#include <cstddef>
#include <string>
#include <vector>

#include "brigade/engine/state/collective.h"
#include "brigade/fsdp/memory/gradient_memory.h"
#include "brigade/fsdp/transport/shard_transport.h"
#include "brigade/fsdp/units/segment.h"
#include "brigade/fsdp/units/unit.h"

namespace brigade {

class UnitReduction final : public Collective {
 public:
  // `index`: among all reductions. `segment`: of that unit. REQUIRES: all
  // outlive this object.
  UnitReduction(size_t index, const Unit& unit, Segment& segment,
                ShardTransport& transport, GradientMemory& memory);

  Segment& segment() { return segment_; }
  const Segment& segment() const { return segment_; }

  // In the sequence, among those that are trained.
  void set_place(size_t place) { place_ = place; }

  // From the next launch on, unless the unit's settings say false. False: over
  // the ranks of a row only, and the segment keeps what comes out as a part of
  // the next sum. Of no effect on a mesh of one row.
  void set_sums_over_replicas(bool value) {
    sums_over_replicas_ = (value && unit_.settings.sums_over_replicas) ||
                          transport_.num_replicas() == 1;
  }
  bool sums_over_replicas() const { return sums_over_replicas_; }

  // As settings are now: whether a backward that is reduced has it.
  bool is_due() const {
    return segment_.is_trained() && unit_.settings.synchronizes;
  }

  // The sum is there, and peers have theirs: it becomes the shards' gradient,
  // of those parameters that any rank `is_used`.
  void commit(const std::vector<char>& is_used);

  std::optional<size_t> unit() const override { return place_; }
  size_t num_awaited() const override { return segment_.parameters().size(); }
  bool is_left_out() override { return false; }
  bool needs_pack() override { return false; }  // but where it is launched
  void pack() override {}
  c10::intrusive_ptr<c10::ivalue::Future> launch() override;
  c10::intrusive_ptr<c10::ivalue::Future> launch_substitute() override;
  at::Tensor result_of(const c10::IValue& value) override { return {}; }
  void deliver(const at::Tensor& result) override {}
  c10::Device device() const override { return segment_.device(); }
  bool fails_by_network_only() const override;
  std::string describe() const override;

 private:
  double scale() const;
  c10::intrusive_ptr<c10::ivalue::Future> reduce(const at::Tensor& whole);

  const size_t index_;
  size_t place_ = 0;
  const Unit& unit_;
  Segment& segment_;
  ShardTransport& transport_;
  GradientMemory& memory_;
  bool sums_over_replicas_ = true;
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_UNITS_UNIT_REDUCTION_H_
