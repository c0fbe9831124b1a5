// The storage of one bucket on one local replica: gradients go in before it
// travels, results come out after.
//
// Dense gradients share one flat buffer (bucket_memory.h); a sparse gradient
// has a bucket to itself.
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
#include "brigade/reducer/buffer_donation.h"
#include "brigade/reducer/packing/packer.h"
#include "brigade/reducer/parameter_table.h"

namespace brigade {

class BucketReplica {
 public:
  virtual ~BucketReplica() = default;

  // Moves the gradients of all slots into buffer(), multiplied by `scale`;
  // zeros for a missing one. `unused_slots`, ascending, got none in this
  // iteration.
  //
  // Errors: RuntimeError naming the parameter whose gradient does not fit.
  virtual void pack(double scale, std::span<const size_t> unused_slots) = 0;

  // The gradients are read on `stream`, which is not where they were made.
  virtual void record_stream(c10::Stream stream) const = 0;

  // Adds the buffer of another local replica, on any device.
  virtual void add(const at::Tensor& buffer) = 0;

  // Travels. Dense: 1D, [numel], wire dtype.
  virtual const at::Tensor& buffer() const = 0;

  // Errors: RuntimeError if `result` can't be delivered.
  virtual void check_result(const at::Tensor& result) const = 0;

  // Hands the reduced buffer out as gradients. `result` may be buffer() or
  // another tensor on the same device. The gradients of
  // `globally_unused_slots`, a subset of pack()'s `unused_slots`, stay as they
  // were before it.
  //
  // Errors: RuntimeError if `result` does not have the bucket's numel or
  // device.
  virtual void deliver(const at::Tensor& result,
                       std::span<const size_t> globally_unused_slots) = 0;

  // In place of deliver(), where the comm hook has seen to the gradients.
  virtual void deliver_nothing(
      std::span<const size_t> /*globally_unused_slots*/) {}

  // Moves gradients that exist into the bucket, if gradients are views.
  virtual void adopt_gradients() {}

  // Zeros like buffer().
  virtual at::Tensor zeros() const = 0;

  // The memory of gradients that are views; undefined if there are none.
  virtual at::Tensor views() const { return {}; }

  // True if `gradient` is the view in the bucket that belongs to a slot.
  virtual bool is_view_in(size_t /*slot*/,
                          const at::Tensor& /*gradient*/) const {
    return false;
  }
};

// Where gradients are views, these are put into `.grad`, whatever users put
// there in between. An unused parameter's place travels as zeros: its gradient
// is set aside, and restored if no rank has used it.
class DenseReplica final : public BucketReplica {
 public:
  // How results become gradients.
  enum class Delivery {
    kViews,           // gradients are views of the buffer
    kCopies,          // the buffer is copied into gradients
    kDonationOrCopy,  // gradients may get the buffer's memory, or copies
  };

  // REQUIRES: `parameters` index into `table`, are of one dtype and device, and
  // `table` outlives this object. With kDonationOrCopy, nobody who is given
  // buffer() writes to it after the collective.
  DenseReplica(const ParameterTable& table, size_t replica,
               std::span<const size_t> parameters, at::ScalarType wire_dtype,
               Delivery delivery);

  void pack(double scale, std::span<const size_t> unused_slots) override;
  const at::Tensor& buffer() const override { return memory_.wire(); }
  void record_stream(c10::Stream stream) const override;
  void add(const at::Tensor& buffer) override;
  void check_result(const at::Tensor& result) const override;
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

  // Units: elements.
  std::span<const SlotRange> ranges() const { return memory_.ranges(); }

 private:
  struct SetAside {
    size_t slot;
    at::Tensor gradient;
  };

  void note_packing_stream();
  void record_delivery(const at::Tensor& tensor) const;
  void leave_memory_to_gradients();
  // The slot's gradient, which is `gradient`, is the bucket's view.
  void install(size_t slot, at::Tensor& gradient);
  // Keeps the values of these gradients where they are views.
  void set_aside(std::span<const size_t> slots);
  // Restores the values of `slots`, ascending, and discards the others.
  void put_back(std::span<const size_t> slots);
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
  BufferDonation donation_;  // of memory_'s, from the second delivery on
  bool has_delivered_ = false;
  // On devices with streams.
  std::optional<c10::Stream> packed_on_;     // last
  std::optional<c10::Stream> delivered_on_;  // last

  // This iteration only.
  std::vector<at::Tensor*> gradients_;  // by slot: the parameters' .grad
  std::vector<const void*> sources_;    // by slot
  std::vector<void*> destinations_;     // by slot
  std::vector<char> keeps_graph_;       // by slot: its gradient has a history
  std::vector<at::Tensor> rearranged_;  // gradients of another memory order
  std::vector<SetAside> set_aside_;     // of unused parameters
};

// A bucket of one parameter whose gradient is a sparse COO tensor: the gradient
// itself travels, scaled. Its number of entries differs from rank to rank,
// which sparse all-reduces allow for.
class SparseReplica final : public BucketReplica {
 public:
  // REQUIRES: `variable` is in `table`, which outlives this object.
  SparseReplica(const ParameterTable& table, VariableIndex variable);

  void pack(double scale, std::span<const size_t> unused_slots) override;

  // Sparse COO, parameter's sizes and dtype; undefined before the first pack.
  const at::Tensor& buffer() const override { return buffer_; }
  void record_stream(c10::Stream stream) const override;
  void add(const at::Tensor& buffer) override;

  void check_result(const at::Tensor& result) const override;
  void deliver(const at::Tensor& result,
               std::span<const size_t> globally_unused_slots) override;
  at::Tensor zeros() const override;

 private:
  const ParameterTable& table_;
  const VariableIndex variable_;
  at::Tensor buffer_;
  // Of the last gradient; until there is one, rows, as embeddings have. It must
  // be equal on all ranks, also on those that contribute nothing.
  int64_t sparse_dim_ = 1;
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_BUCKET_REPLICA_H_
