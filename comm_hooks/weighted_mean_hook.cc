#include "brigade/comm_hooks/weighted_mean_hook.h"

#include <ATen/ops/full.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <utility>
#include <vector>

#include "brigade/comm/streams/futures.h"
#include "brigade/comm_hooks/hook_result.h"

namespace brigade {

namespace {

using Future = c10::ivalue::Future;

// What the future holds in place of a result. An error in the future itself
// would look like one of the network.
constexpr bool kNoMean = false;

c10::IValue divided(const at::Tensor& sum, const at::Tensor& total) {
  const at::NoGradGuard no_grad;
  if (total.is_cpu() && total.item<double>() == 0) return kNoMean;
  at::Tensor result = sum;
  return result.div_(total.squeeze());
}

}  // namespace

WeightedMeanHook::WeightedMeanHook(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group)
    : group_(group, "WeightedMeanHook"), all_reduce_(all_reduce_hook(group)) {}

void WeightedMeanHook::set_weight(double weight) {
  TORCH_CHECK_VALUE(std::isfinite(weight) && weight >= 0,
                    "WeightedMeanHook: a weight must be finite and not "
                    "negative, got ",
                    weight, " on rank ", group_.rank(),
                    ".\nGive a number of samples, for instance.");
  weight_ = weight;
}

c10::intrusive_ptr<Future> WeightedMeanHook::runHook(c10d::GradBucket& bucket) {
  const c10::intrusive_ptr<c10d::ProcessGroup> group = group_.lock();
  std::vector<at::Tensor> total = {at::full(
      {1}, current_,
      at::TensorOptions(at::kDouble).device(bucket.getBuffer().device()))};
  const c10::intrusive_ptr<Future> weighed =
      future_of(group->allreduce(total), total.front());
  // The bucket's own future, since a child of it has its devices. The weights
  // were launched before it, so that it does not wait for them in vain.
  return all_reduce_->runHook(bucket)->then(
      [weighed, total = total.front()](Future& done) {
        weighed->waitAndThrow();
        return divided(tensor_of_hook_result(done.value()), total);
      },
      c10::AnyType::get());
}

at::Tensor WeightedMeanHook::parseHookResult(const c10::IValue& result) {
  TORCH_CHECK(!result.isBool(),
              "WeightedMeanHook: the weights of all ranks add up to 0, so that "
              "there is no mean.\nGive some rank a weight.");
  return result.toTensor();
}

WireFormat WeightedMeanHook::wire_format(at::ScalarType gradient_dtype) const {
  return {.dtype = gradient_dtype, .scale = current_};
}

void WeightedMeanHook::iteration_begins(bool has_data) {
  current_ = has_data ? weight_ : 0;
}

}  // namespace brigade
