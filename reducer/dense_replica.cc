#include "brigade/reducer/dense_replica.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>
#include <utility>

#include "brigade/comm_hooks/gradient_layout.h"
#include "brigade/engine/stream_join.h"
#include "brigade/hooks/prefetch.h"

namespace brigade {
namespace {

// True if `tensor` is of these sizes and lays out its elements so. Strides of
// dimensions of size 1 do not matter.
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

// Thousands of tiny parameters are cold when their bucket is full.
constexpr size_t kPrefetchedSlots = 8;

void prefetch(const at::Tensor& tensor) {
  __builtin_prefetch(tensor.unsafeGetTensorImpl(), /*write=*/1);
}

bool contains(std::span<const size_t> ascending, size_t slot) {
  return std::binary_search(ascending.begin(), ascending.end(), slot);
}

// True if both have elements of one dtype on one device, and nothing special
// about them: no other layout, no lazy conjugation, no subclass.
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
  // The parameter itself may be in another dtype for the time of a backward.
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

// Makes the future's tensor of a complex bucket that travelled as pairs of
// reals complex again.
at::Tensor as_numbers(const at::Tensor& result, at::ScalarType dtype,
                      int64_t numel) {
  if (c10::isComplexType(dtype) && !result.is_complex() &&
      result.numel() == 2 * numel) {
    return at::view_as_complex(
        result.to(c10::toRealValueType(dtype)).reshape({-1, 2}));
  }
  return result;
}

}  // namespace

DenseReplica::DenseReplica(const ParameterTable& table, size_t replica,
                           std::span<const size_t> parameters,
                           at::ScalarType wire_dtype, Delivery delivery,
                           Allocation allocation)
    : table_(table),
      parameters_(parameters.begin(), parameters.end()),
      tensors_(tensors_of(table, replica, parameters)),
      gradients_as_views_(delivery == Delivery::kViews),
      options_(at::TensorOptions(table.dtype(parameters.front()))
                   .device(tensors_.front()->device())),
      wire_dtype_(wire_dtype),
      views_in_(parameters.size()),
      places_(parameters.size()),
      gradients_(parameters.size()),
      sources_(parameters.size()),
      destinations_(parameters.size()),
      keeps_graph_(parameters.size()),
      unused_(parameters.size()) {
  int64_t numel = 0;
  at::DimVector room;
  ranges_.reserve(parameters_.size());
  strides_.reserve(parameters_.size());
  follows_parameter_.reserve(parameters_.size());
  for (size_t slot = 0; slot < parameters_.size(); ++slot) {
    // The table knows, and is warm; thousands of tensors are not.
    const size_t i = parameters_[slot];
    ranges_.push_back({.offset_numel = numel, .numel = table.numel(i)});
    numel += ranges_.back().numel;
    strides_.add(table.gradient_strides(i, room));
    follows_parameter_.push_back(table.shape(i).size() <= 1 &&
                                 table.is_dense(i));
  }
  packer_ = make_packer(tensors_.front()->device(),
                        table.dtype(parameters_.front()), ranges_);
  if (allocation == Allocation::kInPack) return;
  const at::NoGradGuard no_grad;
  allocate();
  // Complex buckets are also seen as pairs of reals, which is one more tensor.
  if (delivery == Delivery::kDonationOrCopy && wire_.is_same(flat_) &&
      !flat_.is_complex()) {
    donation_ = BufferDonation(flat_);
  }
}

void DenseReplica::allocate() {
  flat_ = at::zeros({numel()}, options_);
  wire_ = wire_dtype_ == flat_.scalar_type()
              ? flat_
              : at::empty({numel()}, options_.dtype(wire_dtype_));
  note_memory();
  if (flat_.device().is_cpu()) return;
  allocated_on_ = current_stream(flat_.device());
  zeroed_.emplace(flat_.device().type());
  zeroed_->record(*allocated_on_);
}

// Buffers are zeroed on the stream that allocates them, and their memory goes
// back to it. Others use them as well: where gradients are accumulated, and
// where backward was called.
void DenseReplica::use_buffers_here() {
  if (flat_.device().is_cpu()) return;
  const c10::Stream here = current_stream(flat_.device());
  if (here == *allocated_on_) return;
  if (zeroed_) zeroed_->block(here);  // pairs with the record in allocate()
  zeroed_.reset();
  flat_.record_stream(here);
  if (!wire_.is_same(flat_)) wire_.record_stream(here);
}

// Views take the place of gradients, whose memory goes back to the streams that
// made them: in this backward (StreamJoin knows those), or that of whoever
// called it.
void DenseReplica::note_packing_stream() {
  if (flat_.device().is_cpu()) return;
  packed_on_ = current_stream(flat_.device());
  if (gradients_as_views_ && packed_on_ != delivered_on_) {
    record_stream(*packed_on_);
  }
}

// `tensor`'s memory belongs to the packing stream, or was recorded on it; it is
// used on the current one.
void DenseReplica::record_delivery(const at::Tensor& tensor) const {
  if (!packed_on_) return;
  const c10::Stream here = current_stream(tensor.device());
  if (here != *packed_on_) tensor.record_stream(here);
}

void DenseReplica::release_memory() {
  if (!flat_.defined()) return;
  use_buffers_here();
  flat_.reset();
  wire_.reset();
  std::fill(views_in_.begin(), views_in_.end(), at::Tensor());
  set_aside_.clear();
}

int64_t DenseReplica::pack(double scale, std::span<const size_t> unused_slots) {
  const at::NoGradGuard no_grad;
  if (!flat_.defined()) allocate();
  if (donation_.is_taken()) leave_memory_to_gradients();
  repair_buffers();
  use_buffers_here();
  note_packing_stream();
  set_unused(unused_slots);
  int64_t numel_copied = 0;
  for (size_t slot = 0; slot < parameters_.size(); ++slot) {
    if (slot + kPrefetchedSlots < parameters_.size()) {
      prefetch(parameter(slot + kPrefetchedSlots));
      if (gradients_as_views_) prefetch(views_in_[slot + kPrefetchedSlots]);
    }
    if (gradients_as_views_) view_in(slot);
    gradients_[slot] = &parameter(slot).mutable_grad();
    keeps_graph_[slot] = false;
    sources_[slot] = source_of(slot, *gradients_[slot]);
    const bool stays = sources_[slot] == places_[slot] && wire_.is_same(flat_);
    if (!stays) numel_copied += ranges_[slot].numel;
  }
  packer_->pack(sources_, wire_, scale);
  if (gradients_as_views_) {
    for (size_t slot = 0; slot < parameters_.size(); ++slot) {
      // Whoever saved the last iteration's gradient for a backward of its own
      // shall be told that it has changed.
      if (views_in_[slot].use_count() > 1) {
        views_in_[slot].unsafeGetTensorImpl()->bump_version();
      }
      if (!keeps_graph_[slot] && !unused_[slot]) install_view(slot);
    }
  }
  rearranged_.clear();
  return numel_copied * flat_.element_size();
}

void DenseReplica::set_unused(std::span<const size_t> slots) {
  std::fill(unused_.begin(), unused_.end(), false);
  set_aside_.clear();
  for (const size_t slot : slots) {
    unused_[slot] = true;
    const at::Tensor& gradient = parameter(slot).grad();
    if (is_view_in(slot, gradient)) {
      set_aside_.push_back({.slot = slot, .gradient = gradient.clone()});
    }
  }
}

// What as_strided() makes on these devices, without the dispatcher: this is
// half of the time that it takes to make a replica of tiny parameters.
at::Tensor DenseReplica::make_view(size_t slot) const {
  if (!flat_.is_cpu() && !flat_.is_cuda()) {
    const at::AutoDispatchBelowADInplaceOrView no_view_tracking;
    return view_out(slot, flat_);
  }
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(flat_.storage()), flat_.key_set(),
      flat_.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(shape(slot), strides_[slot],
                                                    ranges_[slot].offset_numel);
  return view;
}

void DenseReplica::leave_memory_to_gradients() {
  flat_ = at::empty(flat_.sizes(), flat_.options());
  wire_ = flat_;
  note_memory();
  donation_.leave(flat_);
}

// A comm hook may have kept a bucket's tensor, and changed what it is.
void DenseReplica::repair_buffers() {
  const int64_t numel = this->numel();
  for (at::Tensor* buffer : {&flat_, &wire_}) {
    const int64_t there =
        static_cast<int64_t>(buffer->storage().nbytes() / buffer->itemsize());
    TORCH_CHECK_VALUE(there >= numel, "the bucket's buffer must have ", numel,
                      " elements, it has ", there,
                      ": a comm hook has made it smaller.\nLet the hook resize "
                      "a copy.");
    const bool as_made = buffer->numel() == numel && buffer->dim() == 1 &&
                         buffer->is_contiguous() &&
                         buffer->storage_offset() == 0;
    if (!as_made) buffer->set_(buffer->storage(), 0, {numel}, {1});
  }
  if (flat_.const_data_ptr() != base_) note_memory();
}

// Views of another memory are of no use then.
void DenseReplica::note_memory() {
  base_ = flat_.const_data_ptr();
  end_ = static_cast<const char*>(base_) + flat_.nbytes();
  const int64_t item_bytes = flat_.element_size();
  for (size_t slot = 0; slot < parameters_.size(); ++slot) {
    places_[slot] = static_cast<const char*>(base_) +
                    ranges_[slot].offset_numel * item_bytes;
    views_in_[slot].reset();
  }
}

// Whoever was given a view as a gradient may have assigned to its data. Then it
// is a gradient like any other.
const at::Tensor& DenseReplica::view_in(size_t slot) {
  at::Tensor& view = views_in_[slot];
  if (!view.defined() || !view.is_alias_of(flat_)) view = make_view(slot);
  return view;
}

bool DenseReplica::is_view_in(size_t slot, const at::Tensor& gradient) const {
  return gradient.defined() && gradient.is_same(views_in_[slot]) &&
         gradient.is_alias_of(flat_);
}

void DenseReplica::install_view(size_t slot) {
  const at::Tensor& view = view_in(slot);
  at::Tensor& gradient = *gradients_[slot];
  if (!gradient.is_same(view)) gradient = view;
}

// The parameter is warm where its gradient is. It says how the gradient should
// be laid out unless it has gaps or may turn between forward and backward.
bool DenseReplica::is_laid_out_as_gradient(size_t slot,
                                           const at::Tensor& tensor) const {
  if (follows_parameter_[slot]) {
    const at::Tensor& alike = parameter(slot);
    return is_laid_out_as(tensor, alike.sizes(), alike.strides());
  }
  return is_laid_out_as(tensor, shape(slot), strides_[slot]);
}

at::IntArrayRef DenseReplica::shape(size_t slot) const {
  return table_.shape(parameters_[slot]);
}

at::Tensor DenseReplica::empty_gradient(size_t slot) const {
  return at::empty_strided(shape(slot), strides_[slot], options_);
}

bool DenseReplica::lies_in_buffer(const void* elements) const {
  return std::less_equal<>()(base_, elements) && std::less<>()(elements, end_);
}

// Where to read the gradient of a slot; null if there is none.
const void* DenseReplica::source_of(size_t slot, const at::Tensor& gradient) {
  if (!gradient.defined()) return nullptr;
  if (gradients_as_views_ && gradient.is_same(views_in_[slot])) {
    return places_[slot];
  }
  keeps_graph_[slot] = gradient.requires_grad();
  // A gradient may also be a piece of this bucket that is not its own place, if
  // the user put it there; reading it while that place is written would mix
  // them up.
  if (same_kind(gradient, flat_) && is_laid_out_as_gradient(slot, gradient)) {
    const void* const elements = gradient.const_data_ptr();
    if (!lies_in_buffer(elements)) return elements;
  }
  check_gradient(table_, parameters_[slot], gradient);
  rearranged_.push_back(empty_gradient(slot).copy_(gradient));
  return rearranged_.back().const_data_ptr();
}

void DenseReplica::check_result(const at::Tensor& result) const {
  const int64_t numel = this->numel();
  const at::Tensor typed =
      as_numbers(result, c10::typeMetaToScalarType(options_.dtype()), numel);
  TORCH_CHECK(typed.layout() == at::kStrided && typed.numel() == numel &&
                  typed.device() == options_.device(),
              "the comm hook must return a dense tensor of ", numel,
              " elements on ", options_.device(), ", it returned ",
              typed.layout(), " ", typed.sizes(), " on ", typed.device(),
              ".\nReturn the reduced bucket.");
}

int64_t DenseReplica::deliver(const at::Tensor& result,
                              std::span<const size_t> globally_unused_slots) {
  const at::NoGradGuard no_grad;
  use_buffers_here();
  if (packed_on_) delivered_on_ = current_stream(flat_.device());
  const at::Tensor typed =
      as_numbers(result, flat_.scalar_type(), flat_.numel());
  return gradients_as_views_ ? deliver_views(typed, globally_unused_slots)
                             : deliver_copies(typed.reshape({-1}).contiguous(),
                                              globally_unused_slots);
}

int64_t DenseReplica::deliver_views(
    const at::Tensor& result, std::span<const size_t> globally_unused_slots) {
  int64_t bytes_copied = 0;
  if (result.const_data_ptr() != flat_.const_data_ptr()) {
    flat_.copy_(result.reshape({-1}));
    bytes_copied += flat_.nbytes();
  }
  put_back(globally_unused_slots);
  for (size_t slot = 0; slot < parameters_.size(); ++slot) {
    if (unused_[slot] && contains(globally_unused_slots, slot)) continue;
    const at::Tensor& gradient = *gradients_[slot];
    if (keeps_graph_[slot] && gradient.defined()) {
      record_delivery(gradient);
      const at::Tensor& view = view_in(slot);
      gradient.detach().copy_(view);
      bytes_copied += view.nbytes();
    } else {
      install_view(slot);  // the user may have taken it out meanwhile
    }
  }
  return bytes_copied;
}

void DenseReplica::deliver_nothing(
    std::span<const size_t> globally_unused_slots) {
  const at::NoGradGuard no_grad;
  put_back(globally_unused_slots);
}

void DenseReplica::put_back(std::span<const size_t> globally_unused_slots) {
  for (const SetAside& kept : set_aside_) {
    if (!contains(globally_unused_slots, kept.slot)) continue;
    record_delivery(kept.gradient);
    view_in(kept.slot).copy_(kept.gradient);
  }
  set_aside_.clear();
}

int64_t DenseReplica::deliver_copies(
    const at::Tensor& result, std::span<const size_t> globally_unused_slots) {
  int64_t numel_copied = 0;
  const int64_t item_bytes = flat_.element_size();
  // Not the first time: buckets may be rebuilt after it, and would live on in
  // gradients.
  const bool may_donate =
      std::exchange(has_delivered_, true) && result.const_data_ptr() == base_;
  const bool unpackable = result.scalar_type() == wire_.scalar_type() ||
                          result.scalar_type() == flat_.scalar_type();
  for (size_t slot = 0; slot < parameters_.size(); ++slot) {
    destinations_[slot] = nullptr;
    if (unused_[slot] && contains(globally_unused_slots, slot)) continue;
    at::Tensor& gradient = parameter(slot).mutable_grad();
    // The backward may have been in another dtype than the parameter is.
    if (!gradient.defined() || gradient.scalar_type() != flat_.scalar_type()) {
      gradient = empty_gradient(slot);
    }
    const bool plain = unpackable && same_kind(gradient, flat_) &&
                       !gradient.requires_grad() &&
                       is_laid_out_as_gradient(slot, gradient);
    if (plain && may_donate &&
        donation_.is_worthwhile(ranges_[slot].numel * item_bytes) &&
        is_laid_out_as(gradient, shape(slot), strides_[slot]) &&
        donation_.give(gradient, make_view(slot))) {
      continue;
    }
    record_delivery(gradient);
    destinations_[slot] = plain ? gradient.mutable_data_ptr() : nullptr;
    gradient.unsafeGetTensorImpl()->bump_version();
    if (!plain) gradient.detach().copy_(view_out(slot, result));
    numel_copied += ranges_[slot].numel;
  }
  if (unpackable) packer_->unpack(result, destinations_);
  return numel_copied * item_bytes;
}

void DenseReplica::adopt_gradients() {
  if (!gradients_as_views_ || !flat_.defined()) return;
  const at::NoGradGuard no_grad;
  for (size_t slot = 0; slot < parameters_.size(); ++slot) {
    at::Tensor& gradient = parameter(slot).mutable_grad();
    // One that does not fit stays where it is; pack() tells of it.
    if (!gradient.defined() || gradient.requires_grad() ||
        gradient.layout() != at::kStrided || gradient.sizes() != shape(slot)) {
      continue;
    }
    view_in(slot).copy_(gradient);
    gradient = view_in(slot);
  }
}

void DenseReplica::record_stream(c10::Stream stream) const {
  for (size_t slot = 0; slot < parameters_.size(); ++slot) {
    const at::Tensor& gradient = parameter(slot).grad();
    if (gradient.defined()) gradient.record_stream(stream);
  }
}

void DenseReplica::add(const at::Tensor& buffer) {
  const at::NoGradGuard no_grad;
  wire_.add_(buffer.to(wire_.device(), /*non_blocking=*/true));
}

at::Tensor DenseReplica::zeros() const {
  return at::zeros({numel()}, options_.dtype(wire_dtype_));
}

int64_t DenseReplica::numel() const {
  return ranges_.back().offset_numel + ranges_.back().numel;
}

at::Tensor DenseReplica::view_out(size_t slot, const at::Tensor& result) const {
  return result.as_strided(
      shape(slot), strides_[slot],
      result.storage_offset() + ranges_[slot].offset_numel);
}

const at::Tensor& DenseReplica::parameter(size_t slot) const {
  return *tensors_[slot];
}

}  // namespace brigade
