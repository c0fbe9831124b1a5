#include "brigade/reducer/bucket.h"

#include <ATen/ops/view_as_real.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/comm/errors/error_texts.h"

namespace brigade {
namespace {

std::vector<c10::Device> devices_of(const ParameterTable& table,
                                    size_t parameter) {
  std::vector<c10::Device> devices;
  for (const std::vector<at::Tensor>& replica : table.replicas()) {
    devices.push_back(replica[parameter].device());
  }
  return devices;
}

at::Tensor as_reals(const at::Tensor& buffer) {
  const bool is_pairs = buffer.layout() == at::kStrided && buffer.is_complex();
  return is_pairs ? at::view_as_real(buffer).view(-1) : buffer;
}

DimsList shapes_as_reals(const ParameterTable& table,
                         std::span<const size_t> members) {
  DimsList shapes;
  for (const size_t member : members) {
    at::DimVector shape(table.shape(member));
    shape.push_back(2);
    shapes.add(shape);
  }
  return shapes;
}

// A user's hook may keep the bucket and write to it in a later iteration, so
// its memory is not donated.
DenseReplica::Delivery delivery_of(bool gradients_as_views,
                                   const HookTraits& hook) {
  using enum DenseReplica::Delivery;
  if (gradients_as_views) return kViews;
  return hook.releases_buffer ? kDonationOrCopy : kCopies;
}

}  // namespace

Bucket::Bucket(const ParameterTable& table, const BucketPlan& plan,
               size_t index, const HookTraits& hook, bool gradients_as_views,
               UsedParameters* used)
    : table_(table),
      index_(index),
      num_buckets_(plan.num_buckets()),
      members_(plan.buckets()[index]),
      used_(used),
      hook_(hook),
      devices_(devices_of(table, plan.buckets()[index].front())),
      dtype_(table.dtype(plan.buckets()[index].front())),
      sparse_(table.is_sparse(plan.buckets()[index].front())),
      wire_dtype_(hook.wire_dtype(dtype_)),
      gradients_as_views_(gradients_as_views),
      streams_(devices_.begin(), devices_.end()) {
  const DenseReplica::Delivery delivery = delivery_of(gradients_as_views, hook);
  for (size_t replica = 0; replica < devices_.size(); ++replica) {
    if (sparse_) {
      replicas_.push_back(std::make_unique<SparseReplica>(
          table,
          VariableIndex{.replica = replica, .parameter = members_.front()}));
      continue;
    }
    auto dense = std::make_unique<DenseReplica>(table, replica, members_,
                                                wire_dtype_, delivery);
    if (replica == 0) ranges_ = dense->ranges();
    replicas_.push_back(std::move(dense));
  }
}

void Bucket::make_grad_bucket() {
  const bool is_complex = c10::isComplexType(dtype_);
  if (is_complex) shapes_of_reals_ = shapes_as_reals(table_, members_);
  std::vector<size_t> offsets;
  std::vector<size_t> lengths;
  std::vector<c10::IntArrayRef> sizes;
  offsets.reserve(ranges_.size());
  lengths.reserve(ranges_.size());
  sizes.reserve(ranges_.size());
  for (size_t slot = 0; slot < ranges_.size(); ++slot) {
    offsets.push_back(ranges_[slot].offset_numel * (is_complex ? 2 : 1));
    lengths.push_back(ranges_[slot].numel * (is_complex ? 2 : 1));
    sizes.push_back(is_complex ? shapes_of_reals_[slot]
                               : table_.shape(members_[slot]));
  }
  std::vector<at::Tensor> parameters;
  parameters.reserve(members_.size());
  for (const size_t member : members_) parameters.push_back(table_[member]);
  grad_bucket_.emplace(index_, num_buckets_, at::Tensor(), std::move(offsets),
                       std::move(lengths), std::move(sizes),
                       std::move(parameters), std::nullopt);
}

int64_t Bucket::buffer_bytes() const {
  if (sparse_) return 0;
  return (ranges_.back().offset_numel + ranges_.back().numel) *
         static_cast<int64_t>(c10::elementSize(wire_dtype_));
}

bool Bucket::is_empty() const { return !sparse_ && buffer_bytes() == 0; }

bool Bucket::fits(const HookTraits& hook) const {
  return hook.wire_dtype(dtype_) == wire_dtype_ &&
         (gradients_as_views_ || hook.releases_buffer == hook_.releases_buffer);
}

std::string Bucket::describe() const {
  return absl::StrCat("bucket ", index_, " of ", num_buckets_, " (",
                      table_.name_of(members_), ")");
}

bool Bucket::is_skipped() {
  return used_ != nullptr && used_->goes_first() &&
         !used_->is_any_used_anywhere(members_);
}

void Bucket::restart() {
  for (StreamUses& streams : streams_) streams.forget();
}

// A hook may change its scale between iterations. The division averages the
// local replicas.
double Bucket::scale() const {
  const double scale = hook_.wire_format == nullptr
                           ? 1.0
                           : hook_.wire_format->wire_format(dtype_).scale;
  return scale / static_cast<double>(replicas_.size());
}

void Bucket::pack() {
  for (size_t replica = 0; replica < replicas_.size(); ++replica) {
    pack_replica(replica);
  }
  sum_replicas();
}

void Bucket::pack_replica(size_t replica) {
  const c10::DeviceGuard on_device(device_of(replica));
  if (streams_[replica].wait()) {
    // The allocator reuses freed gradients on the streams that produced them,
    // while this stream may still read them.
    replicas_[replica]->record_stream(current_stream(device_of(replica)));
  }
  streams_[replica].forget();
  std::vector<size_t> unused;
  if (used_ != nullptr) unused = used_->unused_slots(replica, members_);
  replicas_[replica]->pack(scale(), unused);
  if (replica == 0 && !device().is_cpu()) {
    if (!packed_) packed_.emplace(device().type());
    packed_->record(current_stream(device()));
  }
}

void Bucket::sum_replicas() {
  if (replicas_.size() == 1) return;
  const c10::DeviceGuard on_device(device());
  for (size_t replica = 1; replica < replicas_.size(); ++replica) {
    replicas_.front()->add(replicas_[replica]->buffer());
  }
  if (packed_) packed_->record(current_stream(device()));
}

void Bucket::list_memory(MemoryRanges& memory) const {
  for (const std::unique_ptr<BucketReplica>& replica : replicas_) {
    const at::Tensor views = replica->views();
    if (views.defined()) memory.add(views);
  }
}

void Bucket::adopt_gradients() {
  for (const std::unique_ptr<BucketReplica>& replica : replicas_) {
    replica->adopt_gradients();
  }
}

c10::intrusive_ptr<c10::ivalue::Future> Bucket::launch(bool on_zeros) {
  // Another stream may have packed this bucket.
  if (packed_ && !on_zeros) packed_->block(current_stream(device()));
  if (!grad_bucket_) make_grad_bucket();
  // The hook may have assigned another buffer in the last iteration.
  grad_bucket_->getBufferRef() = as_reals(
      on_zeros ? replicas_.front()->zeros() : replicas_.front()->buffer());
  c10::intrusive_ptr<c10::ivalue::Future> future =
      hook_.hook->runHook(*grad_bucket_);
  TORCH_CHECK(future, brigade::describe(hook_),
              " must return a future for bucket ", index_,
              ", found none.\nReturn the future of the hook's collective.");
  return future;
}

at::Tensor Bucket::result_of(const c10::IValue& value) {
  at::Tensor result = hook_.hook->parseHookResult(value);
  if (!result.defined()) return result;
  TORCH_CHECK_TYPE(
      !c10::isIntegralType(result.scalar_type(), /*includeBool=*/true) ||
          c10::isIntegralType(dtype_, /*includeBool=*/true),
      brigade::describe(hook_),
      " must return a floating-point tensor for "
      "bucket ",
      index_, ", which is cast to ", describe_dtype(dtype_), "; found ",
      describe_dtype(result.scalar_type()),
      ".\nConvert the result before the hook's future completes.");
  replicas_.front()->check_result(
      result, absl::StrCat(brigade::describe(hook_), " must return for bucket ",
                           index_));
  return result;
}

void Bucket::deliver(const at::Tensor& result) {
  if (is_skipped()) return;
  std::vector<size_t> globally_unused;
  if (used_ != nullptr) {
    globally_unused = used_->globally_unused_slots(members_);
  }
  if (is_empty()) {
    for (const auto& each : replicas_) {
      each->deliver(each->buffer(), globally_unused);
    }
    return;
  }
  replicas_.front()->deliver(result, globally_unused);
  for (size_t replica = 1; replica < replicas_.size(); ++replica) {
    const c10::DeviceGuard on_device(device_of(replica));
    // A sparse result becomes the gradient itself, so each replica gets a copy.
    replicas_[replica]->deliver(
        result.defined()
            ? result.to(result.options().device(device_of(replica)),
                        /*non_blocking=*/true, /*copy=*/sparse_)
            : result,
        globally_unused);
  }
}

}  // namespace brigade
