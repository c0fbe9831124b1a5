#include "brigade/fsdp/reduction_hook.h"

#include <ATen/core/List.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <string>
#include <vector>

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

c10::List<at::Tensor> list_of(const at::Tensor& tensor) {
  return c10::List<at::Tensor>({tensor});
}

// `to` gets what is in `from` when `sum` is complete.
FuturePtr then_copied(const FuturePtr& sum, const at::Tensor& from,
                      const at::Tensor& to) {
  const auto type = c10::ListType::create(c10::TensorType::get());
  if (to.is_cpu()) {
    return sum->then(
        [from, to](Future& done) -> c10::IValue {
          if (done.hasError()) std::rethrow_exception(done.exception_ptr());
          const at::NoGradGuard no_grad;
          to.copy_(from);
          return list_of(to);
        },
        type);
  }
  sum->wait();  // the current stream does; pairs with the sum's launch
  if (sum->hasError()) return sum;
  to.copy_(from);
  auto copied =
      c10::make_intrusive<Future>(type, std::vector<c10::Device>{to.device()});
  copied->markCompleted(list_of(to));
  return copied;
}

class CompressionHook final : public ReductionHook {
 public:
  explicit CompressionHook(at::ScalarType wire_dtype)
      : wire_dtype_(wire_dtype) {}

  FuturePtr reduce(ShardTransport& transport,
                   const Reduction& reduction) override {
    const at::NoGradGuard no_grad;
    if (!is_longer(reduction.whole.scalar_type())) {
      return transport.reduce_scatter(reduction.whole, reduction.shard,
                                      reduction.sum);
    }
    const at::Tensor wire = shortened_in_place(reduction.whole, wire_dtype_);
    const int64_t shard_numel = reduction.shard.numel();
    const at::Tensor own =
        wire.narrow(0, transport.shard_rank() * shard_numel, shard_numel);
    return then_copied(transport.reduce_scatter(wire, own, reduction.sum), own,
                       reduction.shard);
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
