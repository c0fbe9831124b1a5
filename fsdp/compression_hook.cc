#include <ATen/core/List.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <string>

#include "brigade/comm/streams/streams.h"
#include "brigade/fsdp/sharded_model.h"

namespace brigade {
namespace {

using c10::ivalue::Future;
using FuturePtr = ReductionHook::FuturePtr;

// Elements that are cast through a temporary tensor.
constexpr int64_t kFirstRun = int64_t{1} << 15;

// Casts `tensor` in place to a dtype at most half as long; returns the cast
// elements, at the front of its memory. Each run is as long as all earlier runs
// together, so its destination holds only elements that are already cast.
at::Tensor cast_in_place(const at::Tensor& tensor, at::ScalarType dtype) {
  const int64_t numel = tensor.numel();
  const at::Tensor cast = tensor.view(dtype).narrow(0, 0, numel);
  int64_t end = std::min(numel, kFirstRun);
  cast.narrow(0, 0, end).copy_(tensor.narrow(0, 0, end).to(dtype));
  while (end < numel) {
    const int64_t run = std::min(numel - end, end);
    cast.narrow(0, end, run).copy_(tensor.narrow(0, end, run));
    end += run;
  }
  return cast;
}

FuturePtr copy_after(const FuturePtr& sum, const at::Tensor& from,
                     const at::Tensor& to) {
  if (!to.is_cpu()) {
    sum->wait();  // on the current stream
    if (sum->hasError()) return sum;
    to.copy_(from);
    return completed_future({to});
  }
  return sum->then(
      [from, to](Future& done) -> c10::IValue {
        if (done.hasError()) std::rethrow_exception(done.exception_ptr());
        const at::NoGradGuard no_grad;
        to.copy_(from);
        return c10::List<at::Tensor>({to});
      },
      c10::ListType::ofTensors());
}

class CompressionHook final : public ReductionHook {
 public:
  explicit CompressionHook(at::ScalarType wire_dtype)
      : wire_dtype_(wire_dtype) {}

  FuturePtr reduce(const Reduction& reduction) override {
    const at::NoGradGuard no_grad;
    const auto& [unit, index, whole, shard, rank, sum] = reduction;
    if (!is_longer(whole.scalar_type())) return sum(whole, shard);
    const at::Tensor wire = cast_in_place(whole, wire_dtype_);
    const at::Tensor own = wire.narrow(0, rank * shard.numel(), shard.numel());
    return copy_after(sum(wire, own), own, shard);
  }

  std::string hook_name() const override {
    return wire_dtype_ == at::kHalf ? "fp16_compress" : "bf16_compress";
  }

  bool fails_by_network_only() const override { return true; }

 private:
  bool is_longer(at::ScalarType dtype) const {
    return at::isFloatingType(dtype) &&
           c10::elementSize(dtype) > c10::elementSize(wire_dtype_);
  }

  const at::ScalarType wire_dtype_;
};

}  // namespace

std::shared_ptr<ReductionHook> compression_hook(at::ScalarType wire_dtype) {
  TORCH_CHECK_VALUE(
      wire_dtype == at::kHalf || wire_dtype == at::kBFloat16,
      "compression_hook: expected wire_dtype to be float16 or bfloat16, found ",
      wire_dtype, ".\nPass one of them, or use no hook.");
  return std::make_shared<CompressionHook>(wire_dtype);
}

}  // namespace brigade
