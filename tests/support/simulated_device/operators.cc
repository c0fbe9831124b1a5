#include "brigade/tests/support/simulated_device/operators.h"

#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <torch/library.h>

#include <optional>
#include <vector>

#include "brigade/tests/support/simulated_device/cpu_kernels.h"
#include "brigade/tests/support/simulated_device/device.h"
#include "brigade/tests/support/simulated_device/memory.h"

namespace brigade::simulated {
namespace {

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<c10::Device> device,
                 std::optional<bool>,
                 std::optional<at::MemoryFormat> memory_format) {
  const c10::DeviceGuard on_device(c10::device_or_default(device));
  return at::detail::empty_generic(
      sizes, &device_allocator(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), memory_format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                         std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>,
                         std::optional<c10::Device> device,
                         std::optional<bool>) {
  return empty_on_device(sizes, strides, c10::dtype_or_default(dtype),
                         c10::device_or_default(device));
}

at::Tensor as_strided(const at::Tensor& self, at::IntArrayRef sizes,
                      at::IntArrayRef strides, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
}

at::Tensor view(const at::Tensor& self, at::IntArrayRef sizes) {
  return at::native::view(self, sizes);
}

at::Tensor reshape_alias(const at::Tensor& self, at::IntArrayRef sizes,
                         at::IntArrayRef strides) {
  return at::native::_reshape_alias(self, sizes, strides);
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef sizes,
                         std::optional<at::MemoryFormat> memory_format) {
  if (self.sizes() == sizes && !memory_format) return self;
  const size_t bytes = at::detail::computeStorageNbytesContiguous(
      sizes, self.itemsize(), self.storage_offset());
  if (bytes > self.storage().nbytes()) {
    resize_storage(*self.storage().unsafeGetStorageImpl(), bytes);
  }
  at::TensorImpl* const impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  if (memory_format) impl->empty_tensor_restride(*memory_format);
  return self;
}

at::Tensor& set_storage_part(at::Tensor& self, at::Storage storage,
                             int64_t offset, at::IntArrayRef sizes,
                             at::IntArrayRef strides) {
  return at::native::set_storage_cpu_(self, std::move(storage), offset, sizes,
                                      strides);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage) {
  return at::native::set_(self, std::move(storage));
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_tensor_(self, source);
}

at::Tensor& set_nothing(at::Tensor& self) {
  at::TensorImpl* const impl = self.unsafeGetTensorImpl();
  impl->set_storage_and_dtype(
      c10::Storage(c10::Storage::use_byte_size_t(), 0, &device_allocator(),
                   /*resizable=*/true),
      self.dtype());
  impl->set_sizes_contiguous({0});
  return self;
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  Simulation::get().record_use(self.storage().data(), stream);
}

at::Scalar local_scalar(const at::Tensor& self) {
  const c10::Stream stream = current_stream(self.device());
  at::Scalar value;
  Simulation::get().run("item", stream, {access_to(self, /*writes=*/false)},
                        [&] { value = for_kernels(self).item(); });
  Simulation::get().host_waits(stream);
  return value;
}

// `after` waits for what `before` has been given.
void order(const c10::Stream& before, const c10::Stream& after) {
  c10::Event event(kDeviceType);
  event.record(before);
  event.block(after);
}

// On the source's current stream, between what the destination's had and will
// have to do.
void copy_on_devices(const at::Tensor& from, const at::Tensor& to) {
  const c10::Stream stream = current_stream(from.device());
  const c10::Stream receiving = current_stream(to.device());
  const bool across = from.device() != to.device();
  if (across) order(receiving, stream);
  Simulation::get().run(
      "copy", stream,
      {access_to(from, /*writes=*/false), access_to(to, /*writes=*/true)},
      [&] { for_kernels(to).copy_(for_kernels(from)); });
  if (across) order(stream, receiving);
}

// Waits unless the host's memory is pinned.
void copy_with_host(const at::Tensor& from, const at::Tensor& to,
                    bool non_blocking, bool is_to_host) {
  const at::Tensor& on_device = is_to_host ? from : to;
  const at::Tensor& on_host = is_to_host ? to : from;
  const c10::Stream stream = current_stream(on_device.device());
  Simulation& simulation = Simulation::get();
  simulation.run(is_to_host ? "copy to host" : "copy from host", stream,
                 {access_to(on_device, /*writes=*/!is_to_host)}, [&] {
                   const at::Tensor memory = for_kernels(on_device);
                   (is_to_host ? to : memory).copy_(is_to_host ? memory : from);
                 });
  void* const host = const_cast<void*>(on_host.const_data_ptr());
  if (!non_blocking || !is_pinned(host)) {
    simulation.host_waits(stream);
  } else {
    simulation.copied(stream, host, access_to(on_host, false).bytes,
                      is_to_host);
  }
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to,
                     bool non_blocking) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (self.numel() == 0) return to;
  if (!is_on_device(self) || !is_on_device(to)) {
    copy_with_host(self, to, non_blocking, /*is_to_host=*/is_on_device(self));
  } else {
    copy_on_devices(self, to);
  }
  return to;
}

}  // namespace

void register_operators() {
  static torch::Library aten(torch::Library::IMPL, "aten",
                             c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  aten.impl("empty.memory_format", empty);
  aten.impl("empty_strided", empty_strided);
  aten.impl("as_strided", as_strided);
  aten.impl("view", view);
  aten.impl("_reshape_alias", reshape_alias);
  aten.impl("view_as_real", at::native::view_as_real);
  aten.impl("view_as_complex", at::native::view_as_complex);
  aten.impl("unfold", at::native::unfold);
  aten.impl("resize_", resize);
  aten.impl("set_.source_Storage_storage_offset", set_storage_part);
  aten.impl("set_.source_Storage", set_storage);
  aten.impl("set_.source_Tensor", set_tensor);
  aten.impl("set_", set_nothing);
  aten.impl("_copy_from", copy_from);
  aten.impl("_local_scalar_dense", local_scalar);
  aten.impl("record_stream", record_stream);
  // LibTorch's would resize its output twice.
  aten.impl("mse_loss",
            torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  // A copy resolves what LibTorch has put off, which would call a copy for it.
  static torch::Library conjugate(torch::Library::IMPL, "aten",
                                  c10::DispatchKey::Conjugate, __FILE__,
                                  __LINE__);
  conjugate.impl("_copy_from", torch::CppFunction::makeFallthrough());
  static torch::Library negative(torch::Library::IMPL, "aten",
                                 c10::DispatchKey::Negative, __FILE__,
                                 __LINE__);
  negative.impl("_copy_from", torch::CppFunction::makeFallthrough());
  static torch::Library others(torch::Library::IMPL, "_",
                               c10::DispatchKey::PrivateUse1, __FILE__,
                               __LINE__);
  others.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

}  // namespace brigade::simulated
