#include "brigade/fsdp/sharded_tensor.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace brigade {
namespace {

void delete_shard(void* shard) { delete static_cast<Shard*>(shard); }

c10::StorageImpl& storage_of(const at::Tensor& tensor) {
  return *tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

std::string access_error(const std::string& subject) {
  return absl::StrCat(subject,
                      " is sharded: this rank holds only its shard, so the "
                      "data can't be read. ",
                      kHowToUnshard);
}

void refuse_access(c10::StorageImpl& storage, const std::string& name) {
  static const std::string nameless = access_error("This tensor");
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(
      name.empty() ? nameless : access_error("Parameter '" + name + "'"));
}

void set_data(c10::StorageImpl& storage, void* data) {
  at::DataPtr& pointer = storage._mutable_data_ptr_no_checks();
  const auto device = pointer.device();
  void* const shard = pointer.release_context();
  pointer = at::DataPtr(data, shard, &delete_shard, device);
}

void set_dtype(const at::Tensor& sharded, caffe2::TypeMeta dtype) {
  if (sharded.dtype() == dtype) return;
  c10::TensorImpl& impl = *sharded.unsafeGetTensorImpl();
  storage_of(sharded).set_nbytes(static_cast<size_t>(sharded.numel()) *
                                 dtype.itemsize());
  impl.set_storage_and_dtype(impl.unsafe_storage(), dtype);
}

}  // namespace

void ShardGroup::require_all_ranks() const {
  TORCH_CHECK_NOT_IMPLEMENTED(
      is_everywhere_,
      "reduction of a parameter that only some ranks hold: the result would "
      "differ between meshes. Use the model's clip_grad_norm() (Python: or "
      "full_tensor()).");
}

ShardGroup& group_of(const Shard& shard) {
  TORCH_CHECK(shard.group != nullptr, "fully_shard: ",
              shard.name.empty() ? "a sharded tensor"
                                 : "parameter '" + shard.name + "'",
              " can't be reduced or gathered before the first forward, which "
              "connects the ranks.\nRun a forward first.");
  return *shard.group;
}

Shard* shard_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.key_set().has(kShardedKey) ||
      !tensor.has_storage()) {
    return nullptr;
  }
  const at::DataPtr& pointer = storage_of(tensor)._mutable_data_ptr_no_checks();
  if (pointer.get_deleter() != &delete_shard) return nullptr;
  return static_cast<Shard*>(pointer.get_context());
}

at::Tensor make_sharded(Shard shard, at::IntArrayRef sizes,
                        at::IntArrayRef strides) {
  const at::Tensor& local = shard.local;
  TORCH_INTERNAL_ASSERT(local.dim() == 1 && shard_of(local) == nullptr);
  const auto dtype = local.dtype();
  const auto device = local.device();
  const auto keys = local.key_set() | c10::DispatchKeySet(kShardedKey);
  const auto bytes =
      static_cast<size_t>(c10::multiply_integers(sizes)) * dtype.itemsize();
  auto context = std::make_unique<Shard>(std::move(shard));
  const std::string name = context->name;
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes,
      at::DataPtr(nullptr, context.release(), &delete_shard, device),
      /*allocator=*/nullptr, /*resizable=*/false));
  refuse_access(*storage.unsafeGetStorageImpl(), name);
  auto impl =
      c10::make_intrusive<c10::TensorImpl>(std::move(storage), keys, dtype);
  impl->set_sizes_and_strides(sizes, strides);
  return at::Tensor(std::move(impl));
}

at::Tensor make_sharded_like(const at::Tensor& sharded, at::Tensor local) {
  const Shard& shard = *shard_of(sharded);
  return make_sharded({.local = std::move(local),
                       .offset = shard.offset,
                       .group = shard.group,
                       .flat_offset = shard.flat_offset,
                       .flat_per_rank = shard.flat_per_rank,
                       .is_whole = shard.is_whole},
                      sharded.sizes(), sharded.strides());
}

at::Tensor gather_whole(const at::Tensor& sharded) {
  const Shard& shard = *shard_of(sharded);
  ShardGroup& group = group_of(shard);
  const at::NoGradGuard no_grad;
  if (shard.owner != nullptr) {
    const Shard* const used = &shard;
    if (shard.owner->use({&used, 1}) == ParameterState::kWritable) {
      // The shards get the writes when unsharded() ends.
      const c10::impl::ExcludeDispatchKeyGuard no_key(kShardedKey);
      return sharded.clone().to(shard.local.scalar_type());
    }
    shard.owner->await_statuses();
  }
  const int64_t numel = sharded.numel();
  if (numel == 0) return at::empty(sharded.sizes(), shard.local.options());
  const int64_t per_rank = shard.flat_per_rank;
  const int64_t longest = std::min(per_rank, numel);
  at::Tensor own = at::zeros({longest}, shard.local.options());
  own.narrow(0, 0, shard.local.numel()).copy_(shard.local);
  const at::Tensor pieces = group.all_gather(own);
  at::Tensor whole = at::empty({numel}, own.options());
  int64_t done = 0;
  for (int64_t rank = 0; rank < pieces.size(0) && done < numel; ++rank) {
    const int64_t end = std::clamp<int64_t>(
        (rank + 1) * per_rank - shard.flat_offset, 0, numel);
    if (end <= done) continue;
    whole.narrow(0, done, end - done)
        .copy_(pieces[rank].narrow(0, 0, end - done));
    done = end;
  }
  return whole.as_strided(sharded.sizes(), sharded.strides());
}

void shard_in_place(const at::Tensor& parameter, Shard shard) {
  TORCH_CHECK_VALUE(shard_of(parameter) == nullptr, "Parameter '", shard.name,
                    "' is sharded already, in another unit or by another call "
                    "of fully_shard().");
  TORCH_CHECK_VALUE(parameter.is_non_overlapping_and_dense(), "Parameter '",
                    shard.name, "' is not dense: its strides are ",
                    parameter.strides(), " for sizes ", parameter.sizes(), ".");
  TORCH_INTERNAL_ASSERT(shard.local.dtype() == parameter.dtype());
  replace_shard(parameter, std::move(shard));
}

void replace_shard(const at::Tensor& tensor, Shard shard) {
  const auto sizes = tensor.sizes().vec();
  const auto strides = tensor.strides().vec();
  tensor.unsafeGetTensorImpl()->shallow_copy_from(
      make_sharded(std::move(shard), sizes, strides).getIntrusivePtr());
}

void bind_memory(const at::Tensor& sharded, void* memory,
                 caffe2::TypeMeta dtype) {
  c10::StorageImpl& storage = storage_of(sharded);
  storage.clear_data_ptr_access_error_msg_();
  set_data(storage, memory);
  set_dtype(sharded, dtype);
}

void unbind_memory(const at::Tensor& sharded, caffe2::TypeMeta dtype) {
  c10::StorageImpl& storage = storage_of(sharded);
  set_data(storage, nullptr);
  const Shard& shard = *shard_of(sharded);
  refuse_access(storage, shard.name);
  set_dtype(sharded, dtype);
}

}  // namespace brigade
