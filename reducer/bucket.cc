#include "brigade/reducer/bucket.h"

#include <c10/util/Exception.h>

#include <utility>
#include <vector>

#include "brigade/reducer/dense_replica.h"
#include "brigade/reducer/sparse_replica.h"

namespace brigade {
namespace {

std::vector<at::Tensor> select(const ParameterTable& table,
                               std::span<const size_t> indices) {
  std::vector<at::Tensor> tensors;
  tensors.reserve(indices.size());
  for (size_t i : indices) tensors.push_back(table[i]);
  return tensors;
}

int64_t total_numel(std::span<const at::Tensor> tensors) {
  int64_t numel = 0;
  for (const at::Tensor& tensor : tensors) numel += tensor.numel();
  return numel;
}

// What a hook that declares no wire format gets: raw gradients.
WireFormat wire_format_of(const c10d::CommHookInterface& hook,
                          at::ScalarType dtype) {
  const auto* built_in = dynamic_cast<const DeclaresWireFormat*>(&hook);
  return built_in ? built_in->wire_format(dtype) : WireFormat{.dtype = dtype};
}

}  // namespace

Bucket::Bucket(const ParameterTable& table, const BucketPlan& plan,
               size_t index, c10d::CommHookInterface& hook,
               bool gradients_as_views)
    : hook_(hook),
      parameters_(select(table, plan.buckets()[index])),
      sparse_(table.is_sparse(plan.buckets()[index].front())),
      numel_(sparse_ ? 0 : total_numel(parameters_)) {
  const std::vector<size_t>& members = plan.buckets()[index];
  const WireFormat format =
      wire_format_of(hook, parameters_.front().scalar_type());
  scale_ = format.scale;
  std::vector<size_t> offsets;
  std::vector<size_t> lengths;
  std::vector<c10::IntArrayRef> sizes;
  if (sparse_) {
    replica_ = std::make_unique<SparseReplica>(table, members.front());
  } else {
    auto dense = std::make_unique<DenseReplica>(table, members, format.dtype,
                                                gradients_as_views);
    for (const SlotRange& range : dense->ranges()) {
      offsets.push_back(range.offset_numel);
      lengths.push_back(range.numel);
    }
    for (const at::Tensor& parameter : parameters_) {
      sizes.push_back(parameter.sizes());
    }
    replica_ = std::move(dense);
  }
  grad_bucket_.emplace(index, plan.num_buckets(), replica_->buffer(),
                       std::move(offsets), std::move(lengths), std::move(sizes),
                       parameters_, std::nullopt);
}

int64_t Bucket::pack(StreamJoin& streams,
                     std::span<const size_t> unused_slots) {
  if (streams.join()) {
    // The gradients are freed on the streams that made them while this one may
    // still read them.
    const c10::Stream packing = current_stream(device());
    for (const at::Tensor& parameter : parameters_) {
      if (parameter.grad().defined()) parameter.grad().record_stream(packing);
    }
  }
  const int64_t bytes_copied = replica_->pack(scale_, unused_slots);
  if (!device().is_cpu()) {
    if (!packed_) packed_.emplace(device().type());
    packed_->record(current_stream(device()));
  }
  return bytes_copied;
}

c10::intrusive_ptr<c10::ivalue::Future> Bucket::launch() {
  // Pairs with the record in pack(): another stream may have packed this
  // bucket, long before the buckets ahead of it were full.
  if (packed_) packed_->block(current_stream(device()));
  return launch(replica_->buffer());
}

c10::intrusive_ptr<c10::ivalue::Future> Bucket::launch_zeros() {
  return launch(replica_->zeros());
}

c10::intrusive_ptr<c10::ivalue::Future> Bucket::launch(
    const at::Tensor& buffer) {
  // The hook of the last iteration may have put another buffer there.
  grad_bucket_->getBufferRef() = buffer;
  c10::intrusive_ptr<c10::ivalue::Future> future = hook_.runHook(*grad_bucket_);
  TORCH_CHECK(future,
              "the comm hook must return a future, it returned none.\n"
              "Return the future of the collective that it launched.");
  return future;
}

int64_t Bucket::deliver(const c10::IValue& value,
                        std::span<const size_t> untouched_slots) {
  return replica_->deliver(hook_.parseHookResult(value), untouched_slots);
}

}  // namespace brigade
