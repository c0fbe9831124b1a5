// Storage of one bucket on one local replica: packs gradients into the buffer
// that is reduced, and delivers the result as gradients.
//
// Dense gradients share one flat buffer. A sparse gradient has its own bucket.
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_REDUCER_BUCKET_REPLICA_H_
#define BRIGADE_REDUCER_BUCKET_REPLICA_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "brigade/reducer/packing/packer.h"
#include "brigade/reducer/parameter_table.h"

namespace brigade {

// ---- Memory.

// One flat buffer in the gradients' dtype and the buffer that is reduced. Each
// gradient has the same slot in both.
class BucketMemory {
 public:
  // Fills the buffers with zeros on the current stream. REQUIRES: `parameters`
  // index into `table`, have one dtype and device, and `table` outlives this
  // object.
  BucketMemory(const ParameterTable& table, size_t replica,
               std::span<const size_t> parameters, at::ScalarType wire_dtype);

  // 1D, [numel].
  const at::Tensor& flat() const { return flat_; }  // gradients' dtype
  const at::Tensor& wire() const { return wire_; }  // wire dtype; may be flat()
  bool wire_is_flat() const { return wire_.is_same(flat_); }

  // Allocates new, uninitialized buffers. Existing views keep the old ones.
  // REQUIRES: wire_is_flat(), on the CPU.
  void reallocate();

  // Prepares the buffers for use on the current stream: restores their sizes,
  // which a comm hook may have changed, and waits for the zero fill.
  void use_on_current_stream();

  // Ends the wait for the zero fill, once a collective after it is complete: a
  // stream that a CUDA graph is captured on must not wait for that event.
  void forget_zero_fill() { zeroed_.reset(); }

  // The slot of flat() in the gradient's shape and strides. Autograd does not
  // see a view, so optimizers may detach_() it.
  const at::Tensor& view(size_t slot) {
    // A user of the view may have assigned to its `data`.
    at::Tensor& view = views_[slot];
    if (!view.defined() || !view.is_alias_of(flat_)) view = make_view(slot);
    return view;
  }

  // The last view(slot); undefined before the first.
  const at::Tensor& made_view(size_t slot) const { return views_[slot]; }

  bool is_view(size_t slot, const at::Tensor& tensor) const {
    return tensor.defined() && tensor.is_same(views_[slot]) &&
           tensor.is_alias_of(flat_);
  }

  // Returns a new tensor equal to view().
  at::Tensor make_view(size_t slot) const;

  // The slot of another tensor, 1D, [numel].
  at::Tensor view_of(const at::Tensor& buffer, size_t slot) const;

  // Address in flat(). REQUIRES: use_on_current_stream() since a hook had the
  // buffer.
  const void* address_of(size_t slot) const {
    return base_ + ranges_[slot].offset_numel * item_bytes_;
  }
  bool contains(const void* elements) const {
    return std::less_equal<>()(base_, elements) &&
           std::less<>()(elements, base_ + numel() * item_bytes_);
  }

  at::IntArrayRef shape(size_t slot) const {
    return table_.shape(parameters_[slot]);
  }
  at::IntArrayRef strides(size_t slot) const {
    return table_.gradient_strides(parameters_[slot]);
  }

  at::Tensor empty_gradient(size_t slot) const;

  int64_t numel() const;
  std::span<const SlotRange> ranges() const { return ranges_; }

  const at::TensorOptions& options() const { return options_; }  // of flat()
  const at::TensorOptions& wire_options() const { return wire_options_; }

  size_t parameter_at(size_t slot) const { return parameters_[slot]; }

 private:
  // Constant after construction.
  const ParameterTable& table_;
  const std::vector<size_t> parameters_;  // by slot
  const at::TensorOptions options_;
  const at::TensorOptions wire_options_;
  std::vector<SlotRange> ranges_;  // by slot
  at::Tensor flat_;
  at::Tensor wire_;
  std::vector<at::Tensor> views_;  // by slot, into flat_
  const int64_t item_bytes_;       // of flat_
  const char* base_ = nullptr;     // of flat_'s memory

  // On devices with streams.
  std::optional<c10::Stream> allocated_on_;
  std::optional<c10::Event> zeroed_;  // null: no wait needed
};

// Donation of a bucket's memory to reduced gradients, in place of a copy back.
// CPU only: on devices, streams may still read the memory.
//
// If somebody still holds donated memory when the bucket is packed again, the
// bucket must take new memory; after kMaxReallocations donation stops. Python
// keeps a storage that it has seen once, which counts as holding it.
class BufferDonation {
 public:
  // A copy of fewer bytes costs less than a donation.
  static constexpr int64_t kMinBytes = int64_t{64} << 10;

  static constexpr int kMaxReallocations = 2;

  // Donates nothing.
  BufferDonation() = default;

  // REQUIRES: at each is_held(), the owner has as many tensors in the memory of
  // `flat` as now.
  explicit BufferDonation(const at::Tensor& flat);

  bool is_worthwhile(int64_t bytes) const {
    return own_references_ > 0 && bytes >= kMinBytes;
  }

  // Moves `gradient`, which stays the same tensor, into the memory of `view`.
  // It gets the values of `view`. Returns false without effect if somebody else
  // holds the gradient or its memory, or has written to it since autograd made
  // it.
  //
  // REQUIRES: both have the same sizes, memory order, dtype and device; the
  // gradient's bytes are worthwhile.
  bool donate(const at::Tensor& gradient, const at::Tensor& view);

  // True if somebody else holds a tensor in donated memory, or has moved the
  // storage to memory that another process sees.
  bool is_held() const;

  // Donates the owner's new memory from here on. REQUIRES: as the constructor.
  void start_again(const at::Tensor& flat);

 private:
  c10::Storage storage_;
  const void* memory_ = nullptr;
  size_t own_references_ = 0;  // 0: donates nothing
  bool has_donated_ = false;
  int num_reallocations_ = 0;
};

// Address ranges of the memory of some tensors.
class MemoryRanges {
 public:
  // REQUIRES: `tensor` has a storage, which overlaps none of those before.
  void add(const at::Tensor& tensor) {
    const auto [begin, end] = range_of(tensor);
    if (begin < end) end_by_begin_[begin] = end;
  }

  // True if the storage of `tensor` begins inside a range; false for a tensor
  // without memory.
  bool contains(const at::Tensor& tensor) const {
    if (!tensor.has_storage()) return false;
    const auto [begin, end] = range_of(tensor);
    if (begin == end) return false;
    const auto after = end_by_begin_.upper_bound(begin);
    return after != end_by_begin_.begin() && begin < std::prev(after)->second;
  }

 private:
  struct Range {
    uintptr_t begin;
    uintptr_t end;
  };

  // Empty on a device without memory.
  static Range range_of(const at::Tensor& tensor) {
    const auto begin = reinterpret_cast<uintptr_t>(tensor.storage().data());
    if (begin == 0) return {0, 0};
    return {begin, begin + tensor.storage().nbytes()};
  }

  std::map<uintptr_t, uintptr_t> end_by_begin_;
};

// ---- Replica.

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
  // another tensor on the same device; undefined if the comm hook has set the
  // gradients itself. `globally_unused_slots`, a subset of
  // pack()'s `unused_slots`, keep the gradients that they had before pack().
  //
  // REQUIRES: check_result() accepts `result`.
  virtual void deliver(const at::Tensor& result,
                       std::span<const size_t> globally_unused_slots) = 0;

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
