#include "brigade/reducer/learned_graph.h"

#include <ATen/ops/tensor.h>

#include <algorithm>

#include "brigade/comm/group/group_info.h"

namespace brigade {

void ReadyOrder::agree(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  if (stage_ == Stage::kAgreed) return;
  const std::vector<int64_t> mine(order_.begin(), order_.end());
  std::vector<at::Tensor> tensors = {
      at::tensor(mine, at::kLong).to(control_device(*group))};
  group->broadcast(tensors)->wait();
  const at::Tensor agreed = tensors.front().cpu();
  const int64_t* begin = agreed.const_data_ptr<int64_t>();
  order_.assign(begin, begin + agreed.numel());
  stage_ = Stage::kAgreed;
}

HookCounts::HookCounts(size_t num_variables)
    : counts_(num_variables), last_run_(num_variables) {}

void HookCounts::restart() { std::fill(counts_.begin(), counts_.end(), 0); }

bool HookCounts::count_run(size_t variable) {
  ++counts_[variable];
  if (!is_learning()) return counts_[variable] == expected_[variable];
  last_run_[variable] = ++num_runs_;
  return false;
}

std::vector<size_t> HookCounts::freeze() {
  // An abort does not reset a rank that learns alone: the others would not
  // count with it.
  stage_ = stage_ == Stage::kLearning ? Stage::kCounted : Stage::kKnown;
  expected_ = counts_;
  std::vector<size_t> called;
  for (size_t i = 0; i < counts_.size(); ++i) {
    (counts_[i] > 0 ? called : silent_).push_back(i);
  }
  std::sort(called.begin(), called.end(),
            [this](size_t a, size_t b) { return last_run_[a] < last_run_[b]; });
  last_run_ = {};
  return called;
}

void HookCounts::confirm() {
  if (stage_ == Stage::kLearning) stage_ = Stage::kLearningAlone;
  if (stage_ == Stage::kCounted) stage_ = Stage::kKnown;
}

void HookCounts::abort() {
  if (stage_ == Stage::kCounted) *this = HookCounts(counts_.size());
}

}  // namespace brigade
