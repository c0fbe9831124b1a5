// Memory of a bucket of dense gradients: its buffers and the views into them,
// and the donation of that memory to gradients.
//
// Thread safety: none.

#ifndef BRIGADE_REDUCER_BUCKET_MEMORY_H_
#define BRIGADE_REDUCER_BUCKET_MEMORY_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "brigade/reducer/packing/packer.h"
#include "brigade/reducer/parameter_table.h"

namespace brigade {

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

}  // namespace brigade

#endif  // BRIGADE_REDUCER_BUCKET_MEMORY_H_
