#include "brigade/tests/support/simulated_device/cpu_kernels.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "brigade/tests/support/simulated_device/device.h"
#include "brigade/tests/support/simulated_device/memory.h"

namespace brigade::simulated {
namespace {

// Their results' sizes depend on values, so the host waits for them.
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
    give_back_written();
    give_results(stream);
    if (tells_host_ || kSizesDependOnValues.count(schema_.name()) > 0) {
      Simulation::get().host_waits(stream);
    }
  }

 private:
  // An argument that is written: on the device, and as the CPU has it.
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
    at::Tensor on_cpu = for_kernels(tensor);
    if (!writes) return on_cpu;
    // An output that the operator may resize, which borrowed memory can't be.
    if (argument.kwarg_only()) on_cpu = on_cpu.clone();
    written_.push_back({.tensor = tensor, .on_cpu = on_cpu});
    return on_cpu;
  }

  void give_back_written() {
    for (const auto& [tensor, on_cpu] : written_) {
      if (tensor.sizes() != on_cpu.sizes()) {
        tensor.resize_(on_cpu.sizes());
        results_.push_back(access_to(tensor, /*writes=*/true));
      }
      if (tensor.numel() == 0) continue;
      const at::Tensor own = for_kernels(tensor);
      if (own.const_data_ptr() != on_cpu.const_data_ptr()) own.copy_(on_cpu);
    }
  }

  void give_results(const c10::Stream& stream) {
    const size_t count = schema_.returns().size();
    for (size_t i = 0; i < count; ++i) {
      give_result(stack_[stack_.size() - count + i], schema_.returns()[i],
                  stream);
    }
    if (!results_.empty()) {
      Simulation::get().run(name() + ", results", stream, results_, [] {});
    }
  }

  void give_result(c10::IValue& value, const c10::Argument& result,
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
        "' returns a view of an argument.\nGive it a kernel of its own in "
        "operators.cc.");
  }

  at::Tensor to_device(const at::Tensor& on_cpu, c10::Device device) {
    const at::Tensor tensor = empty_on_device(on_cpu.sizes(), on_cpu.strides(),
                                              on_cpu.scalar_type(), device);
    for_kernels(tensor).copy_(on_cpu);
    results_.push_back(access_to(tensor, /*writes=*/true));
    return tensor;
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack& stack_;
  std::optional<c10::Device> device_;
  std::vector<KernelAccess> accesses_;
  std::vector<Written> written_;       // in the order of arguments
  std::vector<KernelAccess> results_;  // memory that the operator has made
  size_t num_written_returned_ = 0;
  bool tells_host_ = false;
};

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
  return {.begin = tensor.unsafeGetTensorImpl()->data(),
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

at::Tensor empty_on_device(at::IntArrayRef sizes, at::IntArrayRef strides,
                           at::ScalarType dtype, c10::Device device) {
  const c10::DeviceGuard on_device(device);
  return at::detail::empty_strided_generic(
      sizes, strides, &device_allocator(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call(op, stack).run();
}

}  // namespace brigade::simulated
