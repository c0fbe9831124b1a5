// One bucket of the plan: its storage, and the GradBucket of its comm hook.
// A hook sees complex gradients as pairs of reals, twice as many, so that one
// that casts or compresses does not lose their imaginary parts.
//
// Each local replica has storage of its own. Their buffers are added up in
// replica 0's, one collective runs on that, and the result goes to all.
//
// A bucket knows how to pack, launch and deliver itself; when it does so is
// decided by the engine.
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_REDUCER_BUCKET_H_
#define BRIGADE_REDUCER_BUCKET_H_

#include <c10/core/Event.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <vector>

#include "brigade/comm/streams/streams.h"
#include "brigade/comm_hooks/hook_traits.h"
#include "brigade/planning/bucket_plan.h"
#include "brigade/reducer/bucket_memory.h"
#include "brigade/reducer/bucket_replica.h"
#include "brigade/reducer/collective.h"
#include "brigade/reducer/packing/packer.h"
#include "brigade/reducer/parameter_table.h"
#include "brigade/reducer/used_parameters.h"

namespace brigade {

class Bucket final : public Collective {
 public:
  // `used`: which parameters have gradients; null: all.
  //
  // REQUIRES: `table`, the hook and all references outlive this object,
  // but for its destructor; `index` is in `plan`, and the parameters of a
  // bucket are of one dtype and device.
  Bucket(const ParameterTable& table, const BucketPlan& plan, size_t index,
         const HookTraits& hook, bool gradients_as_views, UsedParameters* used);

  std::optional<size_t> unit() const override { return index_; }
  size_t num_awaited() const override {
    return replicas_.size() * members_.size();
  }

  // No rank used its parameters. Waits for the sum of the used map. Errors:
  // those of that collective.
  bool is_skipped();
  bool is_left_out() override { return is_empty() || is_skipped(); }
  bool needs_pack() override { return !is_skipped(); }

  // An iteration begins: forgets the streams of an unfinished one.
  void restart();

  // The calling thread's current stream has just produced one of its gradients.
  void gradient_produced(size_t replica) { streams_[replica].add_current(); }

  // Packs the gradients of each local replica, and sums these. Errors:
  // BucketReplica::pack()'s.
  void pack() override;

  // Calls the comm hook on the buffer. Errors: RuntimeError if the hook returns
  // no future; those of the hook.
  c10::intrusive_ptr<c10::ivalue::Future> launch() override;

  c10::intrusive_ptr<c10::ivalue::Future> launch_substitute() override;

  // Undefined if the value is None: the hook has set the gradients.
  at::Tensor result_of(const c10::IValue& value) override;

  // To all replicas. Gradients of parameters that no rank used stay as they
  // were. If no element travels, gradients that other ranks have exist here
  // too.
  void deliver(const at::Tensor& result) override;

  // Buckets travel from that of replica 0.
  c10::Device device() const override { return devices_.front(); }

  bool fails_by_network_only() const override {
    return hook_.fails_by_network_only;
  }
  std::string describe() const override;

  // Adds the memory of gradients that are views.
  void list_memory(MemoryRanges& memory) const;

  bool is_view_in(size_t replica, size_t slot,
                  const at::Tensor& gradient) const {
    return replicas_[replica]->is_view_in(slot, gradient);
  }

  // True if another hook would get the same buffers and be the same delivery.
  bool fits(const HookTraits& hook) const;

  // Travels by `hook` from here on. REQUIRES: it fits, and outlives this object
  // likewise; nothing is in flight.
  void set_hook(const HookTraits& hook) { hook_ = hook; }

  // Moves existing gradients into this bucket, if its views are gradients.
  void adopt_gradients();

 private:
  // No element travels. A sparse gradient's length varies.
  bool is_empty() const;
  c10::Device device_of(size_t replica) const { return devices_[replica]; }
  double scale() const;
  void deliver_empty(std::span<const size_t> globally_unused_slots);
  void pack_replica(size_t replica);
  void sum_replicas();
  c10::intrusive_ptr<c10::ivalue::Future> run_hook(const at::Tensor& buffer);
  void make_grad_bucket();

  const ParameterTable& table_;
  const size_t index_;                 // in the plan
  const size_t num_buckets_;           // of the plan
  const std::vector<size_t> members_;  // parameters, by slot
  UsedParameters* const used_;         // null: all are
  HookTraits hook_;
  const std::vector<c10::Device> devices_;  // by replica
  const at::ScalarType dtype_;              // of the gradients
  const bool sparse_;
  const at::ScalarType wire_dtype_;  // of the buffers
  const bool gradients_as_views_;
  std::vector<std::unique_ptr<BucketReplica>> replicas_;  // never empty
  std::span<const SlotRange> ranges_;  // of replica 0's slots; none if sparse
  DimsList shapes_of_reals_;           // of complex gradients, for the hook
  std::vector<StreamUses> streams_;    // by replica: who produced gradients
  // Made when the hook is first called, since it is large.
  std::optional<c10d::GradBucket> grad_bucket_;
  std::optional<c10::Event> packed_;  // null on the CPU
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_BUCKET_H_
