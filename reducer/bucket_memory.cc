#include "brigade/reducer/bucket_memory.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include "brigade/comm/streams/streams.h"

namespace brigade {
namespace {

// An in-place write increases the version. A storage that cannot be resized is
// shared with another library (NumPy), which holds no reference to it.
bool is_as_autograd_made_it(const at::Tensor& gradient) {
  return gradient._version() == 0 && gradient.use_count() == 1 &&
         gradient.storage().use_count() == 1 && gradient.storage().resizable();
}

}  // namespace

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
    // The table is in the cache; thousands of tensors are not.
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

void BucketMemory::reallocate() {
  flat_ = at::empty(flat_.sizes(), flat_.options());
  wire_ = flat_;
  views_.assign(views_.size(), {});
}

// The caching allocator reuses the memory on the stream that allocated it, so
// every other stream is recorded.
void BucketMemory::use_on_current_stream() {
  for (at::Tensor* const buffer : {&flat_, &wire_}) {
    const bool as_made = buffer->numel() == numel() &&
                         buffer->storage_offset() == 0 &&
                         buffer->is_contiguous();
    // set_() also enlarges a storage that is too small.
    if (!as_made) buffer->set_(buffer->storage(), 0, {numel()}, {1});
  }
  base_ = static_cast<const char*>(flat_.const_data_ptr());
  if (flat_.device().is_cpu()) return;
  const c10::Stream here = current_stream(flat_.device());
  if (here == *allocated_on_) return;
  if (zeroed_) zeroed_->block(here);
  zeroed_.reset();
  flat_.record_stream(here);
  if (!wire_is_flat()) wire_.record_stream(here);
}

// On the CPU and CUDA this equals as_strided() without the dispatcher, which
// halves the time to construct a replica of tiny parameters.
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

BufferDonation::BufferDonation(const at::Tensor& flat) {
  if (!flat.is_cpu()) return;
  storage_ = flat.storage();
  memory_ = storage_.data();
  own_references_ = storage_.use_count();
}

bool BufferDonation::donate(const at::Tensor& gradient,
                            const at::Tensor& view) {
  if (!is_as_autograd_made_it(gradient)) return false;
  gradient.set_data(view);
  gradient.unsafeGetTensorImpl()->bump_version();
  has_donated_ = true;
  return true;
}

bool BufferDonation::is_held() const {
  if (!has_donated_) return false;
  if (storage_.use_count() != own_references_ || storage_.data() != memory_) {
    return true;
  }
  // Dropping this copy synchronizes with the thread that dropped the last
  // foreign reference, so its accesses happen before the next pack.
  { const c10::Storage copy = storage_; }
  return false;
}

void BufferDonation::start_again(const at::Tensor& flat) {
  const int num_reallocations = num_reallocations_ + 1;
  *this = num_reallocations < kMaxReallocations ? BufferDonation(flat)
                                                : BufferDonation();
  num_reallocations_ = num_reallocations;
}

}  // namespace brigade
