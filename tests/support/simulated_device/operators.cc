#include "brigade/tests/support/simulated_device/operators.h"

#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "brigade/tests/support/simulated_device/device.h"
#include "brigade/tests/support/simulated_device/memory.h"
#include "brigade/tests/support/simulated_device/simulation.h"

namespace brigade::simulated {
namespace {

bool is_on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kDeviceType;
}

// Covers the bytes from the first element to the last, gaps between strides
// included. REQUIRES: is_on_device().
KernelAccess access_to(const at::Tensor& tensor, bool writes) {
  if (tensor.numel() == 0) return {.writes = writes};
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    last += (tensor.size(d) - 1) * tensor.stride(d);
  }
  return {.begin = tensor.unsafeGetTensorImpl()->data(),
          .bytes = static_cast<size_t>(last + 1) * tensor.itemsize(),
          .writes = writes};
}

// Returns a CPU tensor over the same memory, for kernels only. REQUIRES:
// is_on_device().
at::Tensor cpu_view(const at::Tensor& tensor) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::TensorOptions options =
      at::TensorOptions(tensor.scalar_type()).device(at::kCPU);
  if (tensor.numel() == 0) {
    return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  }
  at::Tensor result =
      at::from_blob(for_kernels(tensor.unsafeGetTensorImpl()->data()),
                    tensor.sizes(), tensor.strides(), options);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    result.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  if (tensor.is_conj()) result._set_conj(true);
  if (tensor.is_neg()) result._set_neg(true);
  return result;
}

// Uses the current stream of `device`.
at::Tensor empty_on_device(at::IntArrayRef sizes, at::IntArrayRef strides,
                           at::ScalarType dtype, c10::Device device) {
  const c10::DeviceGuard on_device(device);
  return at::detail::empty_strided_generic(
      sizes, strides, &device_allocator(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}

// Operators whose result sizes depend on values: the host waits for them.
const std::set<std::string> kSizesDependOnValues = {
    "aten::nonzero", "aten::masked_select", "aten::_unique2"};

// One call of an operator.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), schema_(op.schema()), stack_(*stack) {}

  void run() {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    take_arguments();
    const c10::Stream stream =
        current_stream(device_.value_or(c10::Device(kDeviceType)));
    Simulation::get().run(name(), stream, accesses_, [&] {
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
    });
    copy_written_back();
    return_results(stream);
    if (tells_host_ || kSizesDependOnValues.count(schema_.name()) > 0) {
      Simulation::get().host_waits(stream);
    }
  }

 private:
  // An argument that is written: on the device, and its CPU view.
  struct Written {
    at::Tensor tensor;
    at::Tensor on_cpu;
  };

  std::string name() const {
    return schema_.overload_name().empty()
               ? schema_.name()
               : schema_.name() + "." + schema_.overload_name();
  }

  void take_arguments() {
    const size_t count = schema_.arguments().size();
    for (size_t i = 0; i < count; ++i) {
      take_argument(stack_[stack_.size() - count + i], schema_.arguments()[i]);
    }
  }

  void take_argument(c10::IValue& value, const c10::Argument& argument) {
    if (value.isTensor()) {
      if (value.toTensor().defined()) {
        value = take(value.toTensor(), argument);
      }
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> tensors;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        tensors.push_back(take(tensor, argument));
      }
      value = tensors;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> tensors;
      for (std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
        if (tensor) tensor = take(*tensor, argument);
        tensors.push_back(tensor);
      }
      value = tensors;
    } else if (value.isDevice() && value.toDevice().type() == kDeviceType) {
      device_ = value.toDevice();
      value = c10::Device(at::kCPU);
    }
  }

  at::Tensor take(const at::Tensor& tensor, const c10::Argument& argument) {
    if (!is_on_device(tensor)) return tensor;
    if (!device_) device_ = tensor.device();
    TORCH_CHECK(tensor.device() == *device_, name(),
                ": expected all tensors on ", *device_, ", found one on ",
                tensor.device(), ".\nMove it there first.");
    const bool writes =
        argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    accesses_.push_back(access_to(tensor, writes));
    at::Tensor on_cpu = cpu_view(tensor);
    if (!writes) return on_cpu;
    // The operator may resize an output; a view of device memory can't be.
    if (argument.kwarg_only()) on_cpu = on_cpu.clone();
    written_.push_back({.tensor = tensor, .on_cpu = on_cpu});
    return on_cpu;
  }

  void copy_written_back() {
    for (const auto& [tensor, on_cpu] : written_) {
      if (tensor.sizes() != on_cpu.sizes()) {
        tensor.resize_(on_cpu.sizes());
        results_.push_back(access_to(tensor, /*writes=*/true));
      }
      if (tensor.numel() == 0) continue;
      const at::Tensor own = cpu_view(tensor);
      if (own.const_data_ptr() != on_cpu.const_data_ptr()) own.copy_(on_cpu);
    }
  }

  void return_results(const c10::Stream& stream) {
    const size_t count = schema_.returns().size();
    for (size_t i = 0; i < count; ++i) {
      return_result(stack_[stack_.size() - count + i], schema_.returns()[i],
                    stream);
    }
    if (!results_.empty()) {
      Simulation::get().run(name() + ", results", stream, results_, [] {});
    }
  }

  void return_result(c10::IValue& value, const c10::Argument& result,
                     const c10::Stream& stream) {
    const c10::AliasInfo* const alias = result.alias_info();
    if (value.isTensor()) {
      if (!value.toTensor().defined()) return;
      if (alias != nullptr && alias->isWrite()) {
        value = written_.at(num_written_returned_++).tensor;
        return;
      }
      refuse_view(alias);
      value = to_device(value.toTensor(), stream.device());
    } else if (value.isTensorList()) {
      refuse_view(alias);
      std::vector<at::Tensor> tensors;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        tensors.push_back(to_device(tensor, stream.device()));
      }
      value = tensors;
    } else {
      tells_host_ = true;
    }
  }

  void refuse_view(const c10::AliasInfo* alias) const {
    TORCH_CHECK_NOT_IMPLEMENTED(
        alias == nullptr, "simulated device: '", name(),
        "' returns a view of an argument.\nAdd a kernel for it to "
        "operators.cc.");
  }

  at::Tensor to_device(const at::Tensor& on_cpu, c10::Device device) {
    const at::Tensor tensor = empty_on_device(on_cpu.sizes(), on_cpu.strides(),
                                              on_cpu.scalar_type(), device);
    cpu_view(tensor).copy_(on_cpu);
    results_.push_back(access_to(tensor, /*writes=*/true));
    return tensor;
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack& stack_;
  std::optional<c10::Device> device_;
  std::vector<KernelAccess> accesses_;
  std::vector<Written> written_;       // in the order of arguments
  std::vector<KernelAccess> results_;  // memory that the operator allocated
  size_t num_written_returned_ = 0;
  bool tells_host_ = false;
};

// Any operator, as the CPU's kernel over device memory. The schema says which
// arguments it reads and writes. Errors: NotImplementedError if it returns a
// view; RuntimeError if its tensors are on several devices.
void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call(op, stack).run();
}

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
                        [&] { value = cpu_view(self).item(); });
  Simulation::get().host_waits(stream);
  return value;
}

// Makes `after` wait for the work of `before` so far.
void order(const c10::Stream& before, const c10::Stream& after) {
  c10::Event event(kDeviceType);
  event.record(before);
  event.block(after);
}

// Runs on the source's current stream, ordered with earlier and later work of
// the destination's.
void copy_on_devices(const at::Tensor& from, const at::Tensor& to) {
  const c10::Stream stream = current_stream(from.device());
  const c10::Stream receiving = current_stream(to.device());
  const bool across = from.device() != to.device();
  if (across) order(receiving, stream);
  Simulation::get().run(
      "copy", stream,
      {access_to(from, /*writes=*/false), access_to(to, /*writes=*/true)},
      [&] { cpu_view(to).copy_(cpu_view(from)); });
  if (across) order(stream, receiving);
}

// Blocks unless the host's memory is pinned.
void copy_with_host(const at::Tensor& from, const at::Tensor& to,
                    bool non_blocking, bool is_to_host) {
  const at::Tensor& on_device = is_to_host ? from : to;
  const at::Tensor& on_host = is_to_host ? to : from;
  const c10::Stream stream = current_stream(on_device.device());
  Simulation& simulation = Simulation::get();
  simulation.run(is_to_host ? "copy to host" : "copy from host", stream,
                 {access_to(on_device, /*writes=*/!is_to_host)}, [&] {
                   const at::Tensor memory = cpu_view(on_device);
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
  // LibTorch's kernel would resize its output twice.
  aten.impl("mse_loss",
            torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  // LibTorch would resolve a lazy conjugation or negation by a copy, which
  // calls this one: the kernel resolves it.
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
