// One bucket of the plan: packs gradients, calls the comm hook and delivers the
// result. The engine decides when.
//
// Each local replica has its own storage. pack() adds all buffers to that of
// replica 0, which is reduced; deliver() copies the result to every replica.
//
// A hook sees complex gradients as pairs of reals, so that casts and
// compression keep the imaginary parts.
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
#include "brigade/reducer/bucket_replica.h"
#include "brigade/reducer/collective.h"
#include "brigade/reducer/packing/packer.h"
#include "brigade/reducer/parameter_table.h"
#include "brigade/reducer/used_parameters.h"

namespace brigade {

class Bucket final : public Collective {
 public:
  // `used`: null if every parameter is used.
  //
  // REQUIRES: `table`, the hook and `used` live until this object's destructor;
  // `index` is in `plan`; the bucket's parameters have one dtype and device.
  Bucket(const ParameterTable& table, const BucketPlan& plan, size_t index,
         const HookTraits& hook, bool gradients_as_views, UsedParameters* used);

  std::optional<size_t> unit() const override { return index_; }
  size_t num_awaited() const override {
    return replicas_.size() * members_.size();
  }

  // True if no rank used its parameters. Waits for the all-reduce of the
  // used-parameter bitmap. Errors: those of that collective.
  bool is_skipped();
  bool is_left_out() override { return is_empty() || is_skipped(); }
  bool needs_pack() override { return !is_skipped(); }

  // Begins an iteration: forgets the streams of an unfinished one.
  void restart();

  // Records that the current stream has produced one of its gradients.
  void gradient_produced(size_t replica) { streams_[replica].add_current(); }

  // Errors: those of BucketReplica::pack().
  void pack() override;

  // Calls the comm hook. Errors: RuntimeError if the hook returns no future;
  // those of the hook.
  c10::intrusive_ptr<c10::ivalue::Future> launch(bool on_zeros) override;

  // Undefined if `value` is None: the hook has set the gradients itself.
  at::Tensor result_of(const c10::IValue& value) override;

  // Gradients of parameters that no rank used keep their values. A bucket
  // without elements still makes gradients defined that other ranks have.
  void deliver(const at::Tensor& result) override;

  // The device of replica 0.
  c10::Device device() const override { return devices_.front(); }
  int64_t buffer_bytes() const override;

  bool fails_by_network_only() const override {
    return hook_.fails_by_network_only;
  }
  std::string describe() const override;

  // Adds the buffers that gradients are views of.
  void list_memory(MemoryRanges& memory) const;

  bool is_view_in(size_t replica, size_t slot,
                  const at::Tensor& gradient) const {
    return replicas_[replica]->is_view_in(slot, gradient);
  }

  // True if `hook` can replace the current one without other buffers.
  bool fits(const HookTraits& hook) const;

  // REQUIRES: `hook` fits and lives until this object's destructor; no
  // collective is in flight.
  void set_hook(const HookTraits& hook) { hook_ = hook; }

  // Moves defined gradients into this bucket, if gradients are views.
  void adopt_gradients();

 private:
  // True if it is dense and has no elements.
  bool is_empty() const;
  c10::Device device_of(size_t replica) const { return devices_[replica]; }
  double scale() const;
  void pack_replica(size_t replica);
  void sum_replicas();
  void make_grad_bucket();

  const ParameterTable& table_;
  const size_t index_;
  const size_t num_buckets_;
  const std::vector<size_t> members_;  // parameters, by slot
  UsedParameters* const used_;         // null: all are used
  HookTraits hook_;
  const std::vector<c10::Device> devices_;  // by replica
  const at::ScalarType dtype_;
  const bool sparse_;
  const at::ScalarType wire_dtype_;
  const bool gradients_as_views_;
  std::vector<std::unique_ptr<BucketReplica>> replicas_;  // never empty
  std::span<const SlotRange> ranges_;  // by slot, in replica 0; none if sparse
  DimsList shapes_of_reals_;           // for the hook; complex only
  std::vector<StreamUses> streams_;    // by replica; produced gradients
  // Large, so the first launch makes it.
  std::optional<c10d::GradBucket> grad_bucket_;
  std::optional<c10::Event> packed_;  // null on the CPU
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_BUCKET_H_
