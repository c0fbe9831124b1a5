// Storage of one bucket on one local replica: packs gradients into the buffer
// that is reduced, and delivers the result as gradients.
//
// Dense gradients share one flat buffer (bucket_memory.h). A sparse gradient
// has its own bucket.
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_REDUCER_BUCKET_REPLICA_H_
#define BRIGADE_REDUCER_BUCKET_REPLICA_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "brigade/reducer/bucket_memory.h"
#include "brigade/reducer/packing/packer.h"
#include "brigade/reducer/parameter_table.h"

namespace brigade {

class BucketReplica {
 public:
  virtual ~BucketReplica() = default;

  // Packs the gradients of all slots, multiplied by `scale`, into buffer().
  // Packs zeros for an undefined gradient. `unused_slots`, ascending, got no
  // gradient in this iteration.
  //
  // Errors: RuntimeError that names the parameter if its gradient has another
  // layout, dtype, shape or device than expected.
  virtual void pack(double scale, std::span<const size_t> unused_slots) = 0;

  // Records `stream`, which has not produced the gradients, for all of them.
  virtual void record_stream(c10::Stream stream) const = 0;

  // Adds the buffer of another local replica, on any device.
  virtual void add(const at::Tensor& buffer) = 0;

  // The buffer to reduce. Dense: 1D, [numel], wire dtype.
  virtual const at::Tensor& buffer() const = 0;

  // Errors: RuntimeError if deliver() does not accept `result`.
  virtual void check_result(const at::Tensor& result,
                            const std::string& rule) const = 0;

  // Writes the reduced values to the gradients. `result` may be buffer() or
  // another tensor on the same device. `globally_unused_slots`, a subset of
  // pack()'s `unused_slots`, keep the gradients that they had before pack().
  //
  // REQUIRES: check_result() accepts `result`.
  virtual void deliver(const at::Tensor& result,
                       std::span<const size_t> globally_unused_slots) = 0;

  // Ends an iteration whose comm hook has set the gradients itself, in place of
  // deliver().
  virtual void deliver_nothing(
      std::span<const size_t> /*globally_unused_slots*/) {}

  // Moves defined gradients into the bucket, if gradients are views.
  virtual void adopt_gradients() {}

  // Returns zeros in the shape and dtype of buffer().
  virtual at::Tensor zeros() const = 0;

  // The buffer that gradients are views of; undefined if they are not views.
  virtual at::Tensor views() const { return {}; }

  // True if `gradient` is the bucket's view of that slot.
  virtual bool is_view_in(size_t /*slot*/,
                          const at::Tensor& /*gradient*/) const {
    return false;
  }
};

// If gradients are views, pack() and deliver() assign the views to `.grad`,
// also if the user has assigned another tensor. An unused parameter is packed
// as zeros; pack() saves its gradient, and deliver() restores it if no rank
// used the parameter.
class DenseReplica final : public BucketReplica {
 public:
  enum class Delivery {
    kViews,           // gradients are views of the buffer
    kCopies,          // results are copied into gradients
    kDonationOrCopy,  // gradients get the buffer's memory, or copies
  };

  // REQUIRES: `parameters` index into `table`, have one dtype and device, and
  // `table` outlives this object. With kDonationOrCopy, nobody else writes to
  // buffer() after the collective.
  DenseReplica(const ParameterTable& table, size_t replica,
               std::span<const size_t> parameters, at::ScalarType wire_dtype,
               Delivery delivery);

  void pack(double scale, std::span<const size_t> unused_slots) override;
  const at::Tensor& buffer() const override { return memory_.wire(); }
  void record_stream(c10::Stream stream) const override;
  void add(const at::Tensor& buffer) override;
  void check_result(const at::Tensor& result,
                    const std::string& rule) const override;
  void deliver(const at::Tensor& result,
               std::span<const size_t> globally_unused_slots) override;
  void deliver_nothing(std::span<const size_t> globally_unused_slots) override;
  void adopt_gradients() override;
  at::Tensor zeros() const override;
  at::Tensor views() const override {
    return gradients_as_views_ ? memory_.flat() : at::Tensor();
  }
  bool is_view_in(size_t slot, const at::Tensor& gradient) const override {
    return memory_.is_view(slot, gradient);
  }

  std::span<const SlotRange> ranges() const { return memory_.ranges(); }

 private:
  struct SavedGradient {
    size_t slot;
    at::Tensor gradient;
  };

  void note_packing_stream();
  void record_delivery(const at::Tensor& tensor) const;
  // Assigns the bucket's view to `gradient`, which is the slot's `.grad`.
  void install_view(size_t slot, at::Tensor& gradient);
  // Copies those gradients of `slots` that are views.
  void save_gradients(std::span<const size_t> slots);
  // Restores the saved gradients of `slots`, ascending; discards the others.
  void restore_gradients(std::span<const size_t> slots);
  const void* source_of(size_t slot, const at::Tensor& gradient);
  void deliver_views(const at::Tensor& result,
                     std::span<const size_t> globally_unused_slots);
  void deliver_copies(const at::Tensor& result,
                      std::span<const size_t> globally_unused_slots);
  int64_t numel(size_t slot) const { return memory_.ranges()[slot].numel; }
  size_t num_slots() const { return tensors_.size(); }
  const at::Tensor& parameter(size_t slot) const { return *tensors_[slot]; }

  // Constant after construction.
  const ParameterTable& table_;
  const std::vector<const at::Tensor*> tensors_;  // by slot, of this replica
  const bool gradients_as_views_;

  BucketMemory memory_;
  std::unique_ptr<Packer> packer_;
  BufferDonation donation_;  // of memory_, from the second delivery on
  bool has_delivered_ = false;
  // On devices with streams.
  std::optional<c10::Stream> packed_on_;     // last
  std::optional<c10::Stream> delivered_on_;  // last

  // This iteration only.
  std::vector<at::Tensor*> gradients_;  // by slot: the parameter's `.grad`
  std::vector<const void*> sources_;    // by slot
  std::vector<void*> destinations_;     // by slot
  std::vector<char> requires_grad_;     // by slot: true with create_graph
  std::vector<at::Tensor> reordered_;   // copies in the slot's memory order
  std::vector<SavedGradient> saved_;    // of unused parameters
};

// A bucket of one parameter whose gradient is a sparse COO tensor. The buffer
// is the scaled gradient. Its number of entries may differ between ranks, which
// a sparse all-reduce supports.
class SparseReplica final : public BucketReplica {
 public:
  // REQUIRES: `variable` is in `table`, which outlives this object.
  SparseReplica(const ParameterTable& table, VariableIndex variable);

  void pack(double scale, std::span<const size_t> unused_slots) override;

  // Sparse COO, in the parameter's sizes and dtype; undefined before pack().
  const at::Tensor& buffer() const override { return buffer_; }
  void record_stream(c10::Stream stream) const override;
  void add(const at::Tensor& buffer) override;

  void check_result(const at::Tensor& result,
                    const std::string& rule) const override;
  void deliver(const at::Tensor& result,
               std::span<const size_t> globally_unused_slots) override;
  at::Tensor zeros() const override;

 private:
  const ParameterTable& table_;
  const VariableIndex variable_;
  at::Tensor buffer_;
  // That of the last gradient; 1, an embedding's, before the first. Must be
  // equal on all ranks, also on those without a gradient.
  int64_t sparse_dim_ = 1;
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_BUCKET_REPLICA_H_
