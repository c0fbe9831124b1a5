#include "brigade/reducer/bucket_memory.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include "brigade/comm/streams/streams.h"

namespace brigade {

BucketMemory::BucketMemory(const ParameterTable& table, size_t replica,
                           std::span<const size_t> parameters,
                           at::ScalarType wire_dtype)
    : table_(table),
      parameters_(parameters.begin(), parameters.end()),
      options_(
          at::TensorOptions(table.dtype(parameters.front()))
              .device(table.replicas()[replica][parameters.front()].device())),
      wire_options_(options_.dtype(wire_dtype)),
      views_(parameters.size()),
      item_bytes_(static_cast<int64_t>(options_.dtype().itemsize())) {
  int64_t numel = 0;
  ranges_.reserve(parameters.size());
  for (const size_t parameter : parameters) {
    // The table knows, and is warm; thousands of tensors are not.
    ranges_.push_back({.offset_numel = numel, .numel = table.numel(parameter)});
    numel += ranges_.back().numel;
  }
  const at::NoGradGuard no_grad;
  flat_ = at::zeros({numel}, options_);
  wire_ = wire_options_.dtype() == flat_.dtype()
              ? flat_
              : at::empty({numel}, wire_options_);
  if (flat_.device().is_cpu()) return;
  allocated_on_ = current_stream(flat_.device());
  zeroed_.emplace(flat_.device().type());
  zeroed_->record(*allocated_on_);
}

void BucketMemory::replace() {
  flat_ = at::empty(flat_.sizes(), flat_.options());
  wire_ = flat_;
  views_.assign(views_.size(), {});
}

// Buffers are zeroed on the stream that allocates them, and their memory goes
// back to it. Others use them as well: where gradients are accumulated, and
// where backward was called.
void BucketMemory::use_here() {
  for (at::Tensor* const buffer : {&flat_, &wire_}) {
    const bool as_made = buffer->numel() == numel() &&
                         buffer->storage_offset() == 0 &&
                         buffer->is_contiguous();
    // Makes the storage larger if it must.
    if (!as_made) buffer->set_(buffer->storage(), 0, {numel()}, {1});
  }
  base_ = static_cast<const char*>(flat_.const_data_ptr());
  if (flat_.device().is_cpu()) return;
  const c10::Stream here = current_stream(flat_.device());
  if (here == *allocated_on_) return;
  if (zeroed_) zeroed_->block(here);  // pairs with the constructor's record
  zeroed_.reset();
  flat_.record_stream(here);
  if (!flat_travels()) wire_.record_stream(here);
}

// As as_strided() on these devices, without the dispatcher: this is
// half of the time that it takes to make a replica of tiny parameters.
at::Tensor BucketMemory::make_view(size_t slot) const {
  if (!flat_.is_cpu() && !flat_.is_cuda()) {
    const at::AutoDispatchBelowADInplaceOrView no_view_tracking;
    return view_of(flat_, slot);
  }
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(flat_.storage()), flat_.key_set(),
      flat_.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(shape(slot), strides(slot),
                                                    ranges_[slot].offset_numel);
  return view;
}

at::Tensor BucketMemory::view_of(const at::Tensor& buffer, size_t slot) const {
  return buffer.as_strided(
      shape(slot), strides(slot),
      buffer.storage_offset() + ranges_[slot].offset_numel);
}

at::Tensor BucketMemory::empty_gradient(size_t slot) const {
  return at::empty_strided(shape(slot), strides(slot), options_);
}

int64_t BucketMemory::numel() const {
  return ranges_.back().offset_numel + ranges_.back().numel;
}

}  // namespace brigade
