// One bucket of the plan: its storage, and what a comm hook gets to see of it.
// A hook sees complex gradients as pairs of reals, twice as many, so that one
// that casts or compresses does not lose their imaginary parts.
//
// Each local replica has storage of its own. Their buffers are added up in
// replica 0's, one collective runs on that, and the result goes to all.
//
// A bucket knows how to pack, launch and deliver itself; when it does so is
// decided by the reducer.
//
// Thread safety: none; the reducer's lock covers it.

#ifndef BRIGADE_REDUCER_BUCKET_H_
#define BRIGADE_REDUCER_BUCKET_H_

#include <c10/core/Event.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <vector>

#include "brigade/comm_hooks/wire_format.h"
#include "brigade/planning/bucket_plan.h"
#include "brigade/reducer/bucket_replica.h"
#include "brigade/reducer/collective.h"
#include "brigade/reducer/memory_ranges.h"
#include "brigade/reducer/parameter_table.h"
#include "brigade/reducer/reducer_options.h"
#include "brigade/reducer/stream_join.h"
#include "brigade/reducer/used_parameter_map.h"

namespace brigade {

class Bucket final : public Collective {
 public:
  // `skipped_by`: it is skipped where this map says that no rank used one of
  // its parameters; null: never.
  //
  // REQUIRES: `table`, `hook` and `skipped_by` outlive this object; `index` is
  // in `plan`, and the parameters of a bucket are of one dtype and device.
  Bucket(const ParameterTable& table, const BucketPlan& plan, size_t index,
         c10d::CommHookInterface& hook, const ReducerOptions& options,
         UsedParameterMap* skipped_by);

  std::optional<size_t> bucket() const override { return index_; }
  size_t num_gradients() const override {
    return replicas_.size() * members_.size();
  }

  // True if its collective is left out because no rank used its parameters.
  // Waits for the map that says so. Errors: what the map's collective throws.
  bool is_skipped();
  bool is_left_out() override { return is_empty() || is_skipped(); }

  // Packs the gradients of one local replica, which `streams` produced. Returns
  // the bytes of gradients copied. Unused slots and errors: see
  // BucketReplica::pack.
  int64_t pack(size_t replica, StreamJoin& streams,
               std::span<const size_t> unused_slots);

  // Adds up what all replicas have packed. REQUIRES: they have.
  void sum_replicas();

  // Calls the comm hook on the packed buffer. Errors: RuntimeError if the hook
  // returns no future; what the hook throws.
  c10::intrusive_ptr<c10::ivalue::Future> launch() override;

  // Calls the comm hook on zeros.
  c10::intrusive_ptr<c10::ivalue::Future> launch_substitute() override;

  // The buffers, in all replicas: see BucketReplica::release_memory().
  void release_memory();

  // What the value of a completed future holds; undefined if it is None: the
  // hook has seen to the gradients. Errors: TypeError, RuntimeError if it does
  // not fit.
  at::Tensor result_of(const c10::IValue& value);

  // Hands out a result to all replicas, or nothing if it is undefined. Returns
  // the bytes copied. Untouched slots: see BucketReplica::deliver. REQUIRES:
  // result_of() has returned it.
  int64_t deliver(const at::Tensor& result,
                  std::span<const size_t> untouched_slots);

  // In place of launch() and deliver() where no element travels: gradients that
  // other ranks have exist here too.
  void deliver_empty(std::span<const size_t> untouched_slots);

  // Elements that travel. 0 for a sparse gradient, whose length varies.
  int64_t numel() const { return numel_; }
  bool is_empty() const { return !sparse_ && numel_ == 0; }

  // Buckets travel from that of replica 0.
  c10::Device device_of(size_t replica) const { return devices_[replica]; }
  c10::Device device() const override { return devices_.front(); }

  bool fails_by_network_only() const override;
  std::string describe() const override;

  // Where gradients that are views lie. Empty tensors are left out.
  void list_memory(MemoryRanges& memory) const;

  bool is_view_in(size_t replica, size_t slot,
                  const at::Tensor& gradient) const {
    return replicas_[replica]->is_view_in(slot, gradient);
  }

  // Moves existing gradients into this bucket, if its views are gradients.
  void adopt_gradients();

 private:
  double scale() const;
  c10::intrusive_ptr<c10::ivalue::Future> run_hook(const at::Tensor& buffer);

  const ParameterTable& table_;
  const size_t index_;                 // in the plan
  const size_t num_buckets_;           // of the plan
  const std::vector<size_t> members_;  // parameters, by slot
  UsedParameterMap* const skipped_by_;
  c10d::CommHookInterface& hook_;
  const std::vector<at::Tensor> parameters_;  // of replica 0
  const std::vector<c10::Device> devices_;    // by replica
  const at::ScalarType dtype_;                // of the gradients
  const bool sparse_;
  const int64_t numel_;
  const DeclaresWireFormat* const declared_;  // null: the hook gets raw ones
  std::vector<std::unique_ptr<BucketReplica>> replicas_;  // never empty
  DimsList shapes_of_reals_;  // what the hook sees of complex gradients
  std::optional<c10d::GradBucket> grad_bucket_;  // what the hook sees
  std::optional<c10::Event> packed_;             // null on the CPU
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_BUCKET_H_
