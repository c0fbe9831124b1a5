// The memory of a bucket of dense gradients: one flat buffer in their dtype,
// the buffer that travels, the place of each gradient in both, and the streams
// that use them.
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

class BucketMemory {
 public:
  // Zeros, on the current stream. REQUIRES: `parameters` index into `table`,
  // are of one dtype and device, and `table` outlives this object.
  BucketMemory(const ParameterTable& table, size_t replica,
               std::span<const size_t> parameters, at::ScalarType wire_dtype);

  // 1D, [numel].
  const at::Tensor& flat() const { return flat_; }  // parameters' dtype
  const at::Tensor& wire() const { return wire_; }  // wire dtype; may be flat()
  bool flat_travels() const { return wire_.is_same(flat_); }

  // Lets views keep what they lie in, and takes new memory, which holds
  // anything. REQUIRES: flat_travels(), on the CPU.
  void replace();

  // The current stream is about to use the buffers, which a comm hook may have
  // kept and resized.
  void use_here();

  // They have travelled, after the zero fill, so that no stream needs to wait
  // for it any more: one that a CUDA graph is captured on may not.
  void have_travelled() { zeroed_.reset(); }

  // The gradient's place in flat(), with its shape and strides; no view to
  // autograd, so that optimizers may detach_() it.
  const at::Tensor& view(size_t slot) {
    // Whoever was given a view may have assigned to its data.
    at::Tensor& view = views_[slot];
    if (!view.defined() || !view.is_alias_of(flat_)) view = make_view(slot);
    return view;
  }

  // As view(), but undefined if it has not been made.
  const at::Tensor& made_view(size_t slot) const { return views_[slot]; }

  bool is_view(size_t slot, const at::Tensor& tensor) const {
    return tensor.defined() && tensor.is_same(views_[slot]) &&
           tensor.is_alias_of(flat_);
  }

  // A further tensor like view().
  at::Tensor make_view(size_t slot) const;

  // The slot's place in another tensor, 1D, [numel].
  at::Tensor view_of(const at::Tensor& buffer, size_t slot) const;

  // Of view()'s first element. REQUIRES: use_here() since a hook had the
  // buffer.
  const void* place(size_t slot) const {
    return base_ + ranges_[slot].offset_numel * item_bytes_;
  }
  bool contains(const void* elements) const {
    return std::less_equal<>()(base_, elements) &&
           std::less<>()(elements, base_ + numel() * item_bytes_);
  }

  // Of a slot's gradient, as at construction.
  at::IntArrayRef shape(size_t slot) const {
    return table_.shape(parameters_[slot]);
  }
  at::IntArrayRef strides(size_t slot) const {
    return table_.gradient_strides(parameters_[slot]);
  }

  at::Tensor empty_gradient(size_t slot) const;

  // Units: elements.
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
  std::optional<c10::Event> zeroed_;  // null: waited for
};

// The memory of some tensors, by address.
class MemoryRanges {
 public:
  // REQUIRES: `tensor` has a storage, which overlaps none of those before.
  void add(const at::Tensor& tensor) {
    const auto [begin, end] = range_of(tensor);
    if (begin < end) end_by_begin_[begin] = end;
  }

  // True if the memory of `tensor` begins inside of one of those added. False
  // for a tensor without any.
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

  // Nothing, on a device without memory.
  static Range range_of(const at::Tensor& tensor) {
    const auto begin = reinterpret_cast<uintptr_t>(tensor.storage().data());
    if (begin == 0) return {0, 0};
    return {begin, begin + tensor.storage().nbytes()};
  }

  std::map<uintptr_t, uintptr_t> end_by_begin_;
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_BUCKET_MEMORY_H_
