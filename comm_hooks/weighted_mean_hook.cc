#include "brigade/comm_hooks/weighted_mean_hook.h"

#include <ATen/ops/full.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <exception>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/comm/control_device.h"
#include "brigade/comm/peer_error.h"

namespace brigade {

WeightedMeanHook::WeightedMeanHook(c10::intrusive_ptr<c10d::ProcessGroup> group)
    : group_(std::move(group)),
      all_reduce_(all_reduce_hook(group_)),
      sum_(group_->getSize()) {}

void WeightedMeanHook::set_weight(double weight) {
  TORCH_CHECK_VALUE(std::isfinite(weight) && weight >= 0,
                    "WeightedMeanHook: a weight must be finite and not "
                    "negative, got ",
                    weight, " on rank ", group_->getRank(),
                    ".\nGive a number of samples, for instance.");
  weight_ = weight;
  is_changed_ = true;
}

c10::intrusive_ptr<c10::ivalue::Future> WeightedMeanHook::runHook(
    c10d::GradBucket& bucket) {
  return all_reduce_->runHook(bucket);
}

at::Tensor WeightedMeanHook::parseHookResult(const c10::IValue& result) {
  return all_reduce_->parseHookResult(result);
}

WireFormat WeightedMeanHook::wire_format(at::ScalarType gradient_dtype) const {
  if (is_changed_) {
    is_changed_ = false;
    sum_ = sum_over_ranks(weight_);
  }
  return {.dtype = gradient_dtype, .scale = weight_ / sum_};
}

void WeightedMeanHook::shadow_begins() { sum_over_ranks(0); }

double WeightedMeanHook::sum_over_ranks(double weight) const {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> sum = {
      at::full({1}, weight,
               at::TensorOptions(at::kDouble).device(control_device(*group_)))};
  try {
    group_->allreduce(sum)->wait();
  } catch (...) {
    throw_peer_error(absl::StrCat("WeightedMeanHook: adding up the weights on "
                                  "rank ",
                                  group_->getRank()),
                     std::current_exception());
  }
  const double total = sum.front().item<double>();
  TORCH_CHECK(total > 0,
              "WeightedMeanHook: the weights of all ranks add up to ", total,
              ", so that there is no mean.\nGive some rank a weight.");
  return total;
}

}  // namespace brigade
