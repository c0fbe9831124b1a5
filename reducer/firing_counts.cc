#include "brigade/reducer/firing_counts.h"

#include <algorithm>

namespace brigade {

FiringCounts::FiringCounts(size_t num_variables)
    : counts_(num_variables), last_fired_(num_variables) {}

void FiringCounts::forget() { *this = FiringCounts(counts_.size()); }

void FiringCounts::restart() { std::fill(counts_.begin(), counts_.end(), 0); }

bool FiringCounts::is_last(size_t variable) {
  ++counts_[variable];
  if (!learning_) return counts_[variable] == expected_[variable];
  last_fired_[variable] = ++num_fired_;
  return false;
}

std::vector<size_t> FiringCounts::settle() {
  learning_ = false;
  expected_ = counts_;
  std::vector<size_t> fired;
  for (size_t i = 0; i < counts_.size(); ++i) {
    (counts_[i] > 0 ? fired : silent_).push_back(i);
  }
  std::sort(fired.begin(), fired.end(), [this](size_t a, size_t b) {
    return last_fired_[a] < last_fired_[b];
  });
  last_fired_ = {};
  return fired;
}

}  // namespace brigade
