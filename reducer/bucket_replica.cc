#include "brigade/reducer/bucket_replica.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <utility>

#include "brigade/comm/streams/streams.h"

namespace brigade {
namespace {

// An in-place write increases the version. A storage that cannot be resized is
// shared with another library (NumPy), which holds no reference to it.
bool is_as_autograd_made_it(const at::Tensor& gradient) {
  return gradient._version() == 0 && gradient.use_count() == 1 &&
         gradient.storage().use_count() == 1 && gradient.storage().resizable();
}

// Ignores strides of dimensions of size 1.
bool is_laid_out_as(const at::Tensor& tensor, at::IntArrayRef sizes,
                    at::IntArrayRef strides) {
  const at::IntArrayRef own_sizes = tensor.sizes();
  const at::IntArrayRef own_strides = tensor.strides();
  if (own_sizes.size() != sizes.size()) return false;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (own_sizes[d] != sizes[d]) return false;
    if (sizes[d] > 1 && own_strides[d] != strides[d]) return false;
  }
  return true;
}

// Equal dispatch keys exclude other layouts, lazy conjugation and subclasses.
bool same_kind(const at::Tensor& a, const at::Tensor& b) {
  return a.key_set() == b.key_set() && a.dtype() == b.dtype() &&
         a.device() == b.device();
}

void check_gradient(const ParameterTable& table, size_t parameter,
                    const at::Tensor& gradient) {
  const at::Tensor& expected = table[parameter];
  TORCH_CHECK(gradient.layout() == at::kStrided, "the gradient of ",
              table.name_of(parameter),
              " must be dense, it is sparse.\n"
              "Set its flag in ReducerOptions::expect_sparse_gradients.");
  // The parameter may have another dtype during a backward.
  const bool fits_dtype = gradient.scalar_type() == table.dtype(parameter) ||
                          gradient.scalar_type() == expected.scalar_type();
  TORCH_CHECK(fits_dtype && gradient.device() == expected.device() &&
                  gradient.sizes() == expected.sizes(),
              "the gradient of ", table.name_of(parameter), " must be ",
              table.dtype(parameter), " ", expected.sizes(), " on ",
              expected.device(), ", it is ", gradient.scalar_type(), " ",
              gradient.sizes(), " on ", gradient.device(),
              ".\nSet it to None before the next backward.");
}

// Tiny parameters are often out of the cache when their bucket is full.
constexpr size_t kPrefetchedSlots = 8;

void prefetch(const at::Tensor& tensor) {
  __builtin_prefetch(tensor.unsafeGetTensorImpl(), /*write=*/1);
}

bool contains(std::span<const size_t> ascending, size_t slot) {
  return std::binary_search(ascending.begin(), ascending.end(), slot);
}

std::vector<const at::Tensor*> tensors_of(const ParameterTable& table,
                                          size_t replica,
                                          std::span<const size_t> parameters) {
  std::vector<const at::Tensor*> tensors;
  tensors.reserve(parameters.size());
  for (const size_t parameter : parameters) {
    tensors.push_back(&table.replicas()[replica][parameter]);
  }
  return tensors;
}

// Converts the result of a complex bucket, which was reduced as pairs of reals,
// back to complex numbers.
at::Tensor as_bucket_dtype(const at::Tensor& result, at::ScalarType dtype,
                           int64_t numel) {
  if (c10::isComplexType(dtype) && !result.is_complex() &&
      result.numel() == 2 * numel) {
    return at::view_as_complex(
        result.to(c10::toRealValueType(dtype)).reshape({-1, 2}));
  }
  return result;
}

}  // namespace

// ---- Memory.

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

// ---- Replica.

DenseReplica::DenseReplica(const ParameterTable& table, size_t replica,
                           std::span<const size_t> parameters,
                           at::ScalarType wire_dtype, Delivery delivery)
    : table_(table),
      tensors_(tensors_of(table, replica, parameters)),
      gradients_as_views_(delivery == Delivery::kViews),
      memory_(table, replica, parameters, wire_dtype),
      gradients_(parameters.size()),
      sources_(parameters.size()),
      destinations_(parameters.size()),
      requires_grad_(parameters.size()) {
  const std::span<const SlotRange> ranges = memory_.ranges();
  packer_ =
      make_packer(memory_.options().device(), table.dtype(parameters.front()),
                  {ranges.begin(), ranges.end()});
  // A complex bucket's view as pairs of reals is another tensor in its memory.
  if (delivery == Delivery::kDonationOrCopy && memory_.wire_is_flat() &&
      !memory_.flat().is_complex()) {
    donation_ = BufferDonation(memory_.flat());
  }
}

// pack() replaces gradients by views; the allocator then reuses their memory on
// the stream that allocated it. Bucket::pack_replica() covers the streams of
// this backward. Other gradients belong to the stream that called backward.
void DenseReplica::note_packing_stream() {
  if (memory_.flat().device().is_cpu()) return;
  packed_on_ = current_stream(memory_.flat().device());
  if (gradients_as_views_ && packed_on_ != delivered_on_) {
    record_stream(*packed_on_);
  }
}

// Records the current stream for `tensor`, whose memory was allocated or
// recorded on the packing stream.
void DenseReplica::record_delivery(const at::Tensor& tensor) const {
  if (!packed_on_) return;
  const c10::Stream here = current_stream(tensor.device());
  if (here != *packed_on_) tensor.record_stream(here);
}

void DenseReplica::pack(double scale, std::span<const size_t> unused_slots) {
  const at::NoGradGuard no_grad;
  if (donation_.is_held()) {
    memory_.reallocate();
    donation_.start_again(memory_.flat());
  }
  memory_.use_on_current_stream();
  note_packing_stream();
  save_gradients(unused_slots);
  for (size_t slot = 0; slot < num_slots(); ++slot) {
    const size_t ahead = slot + kPrefetchedSlots;
    if (ahead < num_slots()) {
      prefetch(parameter(ahead));
      if (gradients_as_views_) prefetch(memory_.made_view(ahead));
    }
    if (gradients_as_views_) memory_.view(slot);
    gradients_[slot] = &parameter(slot).mutable_grad();
    requires_grad_[slot] = false;
    sources_[slot] = source_of(slot, *gradients_[slot]);
  }
  packer_->pack(sources_, memory_.wire(), scale);
  if (gradients_as_views_) {
    for (size_t slot = 0; slot < num_slots(); ++slot) {
      // Autograd must detect that a view saved for another backward changed.
      const at::Tensor& view = memory_.made_view(slot);
      if (view.use_count() > 1) view.unsafeGetTensorImpl()->bump_version();
      if (!requires_grad_[slot] && !contains(unused_slots, slot)) {
        install_view(slot, *gradients_[slot]);
      }
    }
  }
  reordered_.clear();
}

void DenseReplica::install_view(size_t slot, at::Tensor& gradient) {
  const at::Tensor& view = memory_.view(slot);
  if (!gradient.is_same(view)) gradient = view;
}

void DenseReplica::save_gradients(std::span<const size_t> slots) {
  saved_.clear();
  for (const size_t slot : slots) {
    const at::Tensor& gradient = parameter(slot).grad();
    if (memory_.is_view(slot, gradient)) {
      saved_.push_back({.slot = slot, .gradient = gradient.clone()});
    }
  }
}

void DenseReplica::restore_gradients(std::span<const size_t> slots) {
  for (const SavedGradient& saved : saved_) {
    if (!contains(slots, saved.slot)) continue;
    record_delivery(saved.gradient);
    memory_.view(saved.slot).copy_(saved.gradient);
  }
  saved_.clear();
}

// Returns the address of the gradient's elements, in the slot's memory order;
// null if the gradient is undefined.
const void* DenseReplica::source_of(size_t slot, const at::Tensor& gradient) {
  if (!gradient.defined()) return nullptr;
  if (gradients_as_views_ && gradient.is_same(memory_.made_view(slot))) {
    return memory_.address_of(slot);
  }
  requires_grad_[slot] = gradient.requires_grad();
  // The user may have assigned a view of another slot. Packing could overwrite
  // that slot before this gradient is read, so it is copied first.
  if (same_kind(gradient, memory_.flat()) &&
      is_laid_out_as(gradient, memory_.shape(slot), memory_.strides(slot))) {
    const void* const elements = gradient.const_data_ptr();
    if (!memory_.contains(elements)) return elements;
  }
  check_gradient(table_, memory_.parameter_at(slot), gradient);
  reordered_.push_back(memory_.empty_gradient(slot).copy_(gradient));
  return reordered_.back().const_data_ptr();
}

void DenseReplica::check_result(const at::Tensor& result,
                                const std::string& rule) const {
  const int64_t numel = memory_.numel();
  const at::Tensor typed = as_bucket_dtype(
      result, c10::typeMetaToScalarType(memory_.options().dtype()), numel);
  TORCH_CHECK(typed.layout() == at::kStrided && typed.numel() == numel &&
                  typed.device() == memory_.options().device(),
              rule, " a dense tensor of ", numel, " elements on ",
              memory_.options().device(), ", found a ",
              typed.layout() == at::kStrided ? "" : "sparse ",
              "tensor of shape ", typed.sizes(), " on ", typed.device(),
              ".\nReturn the reduced bucket.");
}

void DenseReplica::deliver(const at::Tensor& result,
                           std::span<const size_t> globally_unused_slots) {
  const at::NoGradGuard no_grad;
  if (!result.defined()) return restore_gradients(globally_unused_slots);
  memory_.use_on_current_stream();
  memory_.forget_zero_fill();
  if (packed_on_) delivered_on_ = current_stream(memory_.flat().device());
  const at::Tensor typed = as_bucket_dtype(result, memory_.flat().scalar_type(),
                                           memory_.flat().numel());
  if (gradients_as_views_) return deliver_views(typed, globally_unused_slots);
  const bool is_flat = typed.dim() == 1 && typed.is_contiguous();
  deliver_copies(is_flat ? typed : typed.reshape({-1}).contiguous(),
                 globally_unused_slots);
}

void DenseReplica::deliver_views(
    const at::Tensor& result, std::span<const size_t> globally_unused_slots) {
  if (result.const_data_ptr() != memory_.flat().const_data_ptr()) {
    memory_.flat().copy_(result.reshape({-1}));
  }
  restore_gradients(globally_unused_slots);
  for (size_t slot = 0; slot < num_slots(); ++slot) {
    if (contains(globally_unused_slots, slot)) continue;
    at::Tensor& gradient = *gradients_[slot];
    if (requires_grad_[slot] && gradient.defined()) {
      record_delivery(gradient);
      gradient.detach().copy_(memory_.view(slot));
    } else {
      install_view(slot, gradient);  // the user may have reassigned `.grad`
    }
  }
}

void DenseReplica::deliver_copies(
    const at::Tensor& result, std::span<const size_t> globally_unused_slots) {
  const int64_t item_bytes = memory_.flat().element_size();
  // The first delivery copies: buckets may be rebuilt after it, and donated
  // gradients would keep the old ones alive.
  const bool may_donate = std::exchange(has_delivered_, true) &&
                          result.const_data_ptr() == memory_.address_of(0);
  const bool unpackable =
      result.scalar_type() == memory_.wire().scalar_type() ||
      result.scalar_type() == memory_.flat().scalar_type();
  for (size_t slot = 0; slot < num_slots(); ++slot) {
    destinations_[slot] = nullptr;
    if (contains(globally_unused_slots, slot)) continue;
    at::Tensor& gradient = parameter(slot).mutable_grad();
    // The backward may have run in another dtype than the parameter's.
    if (!gradient.defined() ||
        gradient.scalar_type() != memory_.flat().scalar_type()) {
      gradient = memory_.empty_gradient(slot);
    }
    const bool plain =
        unpackable && same_kind(gradient, memory_.flat()) &&
        !gradient.requires_grad() &&
        is_laid_out_as(gradient, memory_.shape(slot), memory_.strides(slot));
    if (plain && may_donate &&
        donation_.is_worthwhile(numel(slot) * item_bytes) &&
        donation_.donate(gradient, memory_.make_view(slot))) {
      continue;
    }
    record_delivery(gradient);
    destinations_[slot] = plain ? gradient.mutable_data_ptr() : nullptr;
    gradient.unsafeGetTensorImpl()->bump_version();
    if (!plain) gradient.detach().copy_(memory_.view_of(result, slot));
  }
  if (unpackable) packer_->unpack(result, destinations_);
}

void DenseReplica::adopt_gradients() {
  if (!gradients_as_views_) return;
  const at::NoGradGuard no_grad;
  for (size_t slot = 0; slot < num_slots(); ++slot) {
    at::Tensor& gradient = parameter(slot).mutable_grad();
    // The next pack() reports an unsuitable gradient.
    if (!gradient.defined() || gradient.requires_grad() ||
        gradient.layout() != at::kStrided ||
        gradient.sizes() != memory_.shape(slot)) {
      continue;
    }
    memory_.view(slot).copy_(gradient);
    gradient = memory_.view(slot);
  }
}

void DenseReplica::record_stream(c10::Stream stream) const {
  for (size_t slot = 0; slot < num_slots(); ++slot) {
    const at::Tensor& gradient = parameter(slot).grad();
    if (gradient.defined()) gradient.record_stream(stream);
  }
}

void DenseReplica::add(const at::Tensor& buffer) {
  const at::NoGradGuard no_grad;
  memory_.wire().add_(
      buffer.to(memory_.wire().device(), /*non_blocking=*/true));
}

at::Tensor DenseReplica::zeros() const {
  return at::zeros({memory_.numel()}, memory_.wire_options());
}

SparseReplica::SparseReplica(const ParameterTable& table,
                             VariableIndex variable)
    : table_(table), variable_(variable) {}

void SparseReplica::pack(double scale,
                         std::span<const size_t> /*unused_slots*/) {
  const at::NoGradGuard no_grad;
  const at::Tensor& gradient = table_[variable_].mutable_grad();
  if (!gradient.defined()) {
    buffer_ = zeros();
    return;
  }
  TORCH_CHECK(gradient.layout() == at::kSparse, "the gradient of ",
              table_.name_of(variable_.parameter),
              " must be sparse COO, it is ", gradient.layout(),
              ".\nClear its flag in ReducerOptions::expect_sparse_gradients.");
  sparse_dim_ = gradient.sparse_dim();
  buffer_ = at::mul(gradient, scale);
}

void SparseReplica::check_result(const at::Tensor& result,
                                 const std::string& rule) const {
  const at::Tensor& parameter = table_[variable_];
  TORCH_CHECK(result.sizes() == parameter.sizes(), rule,
              " a gradient of shape ", parameter.sizes(), " for ",
              table_.name_of(variable_.parameter), ", found shape ",
              result.sizes(), ".\nReturn the reduced bucket.");
}

void SparseReplica::deliver(const at::Tensor& result,
                            std::span<const size_t> globally_unused_slots) {
  if (!result.defined() || !globally_unused_slots.empty()) return;
  const at::NoGradGuard no_grad;
  const at::Tensor& parameter = table_[variable_];
  parameter.mutable_grad() = result.to(parameter.scalar_type());
}

void SparseReplica::record_stream(c10::Stream stream) const {
  const at::Tensor& gradient = table_[variable_].grad();
  if (gradient.defined()) gradient.record_stream(stream);
}

void SparseReplica::add(const at::Tensor& buffer) {
  const at::NoGradGuard no_grad;
  buffer_ = at::add(buffer_, buffer.to(buffer_.device()));
}

at::Tensor SparseReplica::zeros() const {
  const at::Tensor& parameter = table_[variable_];
  std::vector<int64_t> values_sizes = {0};
  for (int64_t d = sparse_dim_; d < parameter.dim(); ++d) {
    values_sizes.push_back(parameter.size(d));
  }
  const at::TensorOptions options = parameter.options().requires_grad(false);
  return at::sparse_coo_tensor(
      at::empty({sparse_dim_, 0}, options.dtype(at::kLong)),
      at::empty(values_sizes, options), parameter.sizes());
}

}  // namespace brigade
