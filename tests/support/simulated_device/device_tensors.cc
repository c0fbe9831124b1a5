#include "brigade/tests/support/simulated_device/device_tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>

#include "brigade/tests/support/simulated_device/device_allocator.h"

namespace brigade::simulated {
namespace {

const void* first_element(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->data();
}

}  // namespace

bool is_on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kDeviceType;
}

KernelAccess access_to(const at::Tensor& tensor, bool writes) {
  if (tensor.numel() == 0) return {.writes = writes};
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    last += (tensor.size(d) - 1) * tensor.stride(d);
  }
  return {.begin = first_element(tensor),
          .bytes = static_cast<size_t>(last + 1) * tensor.itemsize(),
          .writes = writes};
}

at::Tensor for_kernels(const at::Tensor& tensor) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::TensorOptions options =
      at::TensorOptions(tensor.scalar_type()).device(at::kCPU);
  if (tensor.numel() == 0) {
    return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  }
  at::Tensor result = at::from_blob(
      Simulation::get().memory().for_kernels(first_element(tensor)),
      tensor.sizes(), tensor.strides(), options);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    result.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  if (tensor.is_conj()) result._set_conj(true);
  if (tensor.is_neg()) result._set_neg(true);
  return result;
}

at::Tensor empty_on_device(at::IntArrayRef sizes, at::IntArrayRef strides,
                           at::ScalarType dtype, c10::Device device) {
  const c10::DeviceGuard on_device(device);
  return at::detail::empty_strided_generic(
      sizes, strides, &device_allocator(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}

}  // namespace brigade::simulated
