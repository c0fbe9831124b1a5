#include "brigade/reducer/hook_counts.h"

#include <algorithm>

namespace brigade {

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
  // No other rank will count again with one that learns alone.
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
