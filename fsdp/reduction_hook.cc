#include "brigade/fsdp/reduction_hook.h"

#include <ATen/core/List.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <string>

#include "brigade/comm/streams/streams.h"

namespace brigade {
namespace {

using c10::ivalue::Future;
using FuturePtr = ReductionHook::FuturePtr;

// Elements that are shortened through memory of their own; each later run is
// as long as all before it, so that there are few.
constexpr int64_t kFirstRun = int64_t{1} << 15;

// The elements of `tensor` in a dtype of at most half their length, in the
// front of its memory. A run is written where only runs before it were.
at::Tensor shortened_in_place(const at::Tensor& tensor, at::ScalarType dtype) {
  const int64_t numel = tensor.numel();
  const at::Tensor shorter = tensor.view(dtype).narrow(0, 0, numel);
  int64_t end = std::min(numel, kFirstRun);
  shorter.narrow(0, 0, end).copy_(tensor.narrow(0, 0, end).to(dtype));
  while (end < numel) {
    const int64_t run = std::min(numel - end, end);
    shorter.narrow(0, end, run).copy_(tensor.narrow(0, end, run));
    end += run;
  }
  return shorter;
}

// `to` gets the elements of `from` when `sum` is complete.
FuturePtr then_copied(const FuturePtr& sum, const at::Tensor& from,
                      const at::Tensor& to) {
  if (!to.is_cpu()) {
    sum->wait();  // the current stream does; pairs with the sum's launch
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
    const at::Tensor wire = shortened_in_place(whole, wire_dtype_);
    const at::Tensor own = wire.narrow(0, rank * shard.numel(), shard.numel());
    return then_copied(sum(wire, own), own, shard);
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
      "compression_hook: expected Half or BFloat16 for what travels, found ",
      wire_dtype, ".\nGive one of them, or no hook.");
  return std::make_shared<CompressionHook>(wire_dtype);
}

}  // namespace brigade
