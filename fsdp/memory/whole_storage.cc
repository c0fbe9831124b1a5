#include "brigade/fsdp/memory/whole_storage.h"

#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>
#include <c10/core/StorageImpl.h>

#include <utility>

namespace brigade {
namespace {

at::Tensor tensor_without_memory(at::ScalarType dtype, int64_t numel,
                                 c10::Device device) {
  const at::NoGradGuard no_grad;
  if (device.is_meta()) {
    return at::empty({numel}, at::TensorOptions().dtype(dtype).device(device));
  }
  const size_t bytes = numel * c10::elementSize(dtype);
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, at::DataPtr(nullptr, device),
      /*allocator=*/nullptr, /*resizable=*/false));
  return at::empty({0}, at::TensorOptions().dtype(dtype).device(device))
      .set_(std::move(storage), 0, {numel}, {1});
}

// Older versions of torch can't take an access error back. A storage without
// memory is refused by them too, in words of their own.
template <typename Storage>
concept TakesErrorsBack = requires(Storage& storage) {
  storage.clear_data_ptr_access_error_msg_();
};

template <typename Storage>
void set_access_error(Storage& storage, const std::string& why) {
  if constexpr (TakesErrorsBack<Storage>) {
    storage.release_data_and_set_meta_custom_data_ptr_error_msg_(why);
  }
}

template <typename Storage>
void clear_access_error(Storage& storage) {
  if constexpr (TakesErrorsBack<Storage>) {
    storage.clear_data_ptr_access_error_msg_();
  }
}

}  // namespace

WholeStorage::WholeStorage(at::ScalarType dtype, int64_t numel,
                           c10::Device device, std::string why_unbound)
    : device_(device),
      why_unbound_(std::move(why_unbound)),
      whole_(tensor_without_memory(dtype, numel, device)) {
  refuse_access();
}

at::Tensor WholeStorage::view(int64_t offset, at::IntArrayRef sizes,
                              at::IntArrayRef strides) const {
  const at::NoGradGuard no_grad;
  return whole_.as_strided(sizes, strides, offset);
}

void WholeStorage::bind(at::Tensor memory) {
  memory_ = std::move(memory);
  c10::StorageImpl& storage =
      *whole_.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  clear_access_error(storage);
  storage.set_data_ptr_noswap(at::DataPtr(
      memory_.data_ptr(), new at::Tensor(memory_),
      [](void* memory) { delete static_cast<at::Tensor*>(memory); }, device_));
}

void WholeStorage::unbind() {
  memory_ = at::Tensor();
  refuse_access();
}

void WholeStorage::set_why_unbound(std::string why) {
  why_unbound_ = std::move(why);
  if (!is_bound()) refuse_access();
}

void WholeStorage::refuse_access() {
  if (device_.is_meta()) return;  // nobody can
  c10::StorageImpl& storage =
      *whole_.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  storage.set_data_ptr_noswap(at::DataPtr(nullptr, device_));
  set_access_error(storage, why_unbound_);
}

}  // namespace brigade
