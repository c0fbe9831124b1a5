#include "brigade/fsdp/schedule/step_plans.h"

#include <algorithm>
#include <utility>

namespace brigade {
namespace {

constexpr int kNumBelieved = 3;  // first steps
constexpr int kNumAlikeForMore = 1;
constexpr int kNumAlikeForLess = 8;

}  // namespace

bool StepPlans::follow(
    RecordedStep step,
    const std::function<bool(std::span<const RecordedUse> step)>&
        calls_suffice) {
  num_alike_ = step.uses == last_ ? num_alike_ + 1 : 0;
  last_ = std::move(step.uses);
  num_steps_ = std::min(num_steps_ + 1, kNumBelieved + 1);
  const bool is_less = step.is_as_planned;
  if (num_steps_ > kNumBelieved &&
      num_alike_ < (is_less ? kNumAlikeForLess : kNumAlikeForMore)) {
    return false;
  }
  if (is_less && planned_.empty()) return false;
  if (last_.empty() || last_ == planned_) return false;
  planned_.clear();
  if (!is_less || !calls_suffice(last_)) planned_ = last_;
  return true;
}

}  // namespace brigade
