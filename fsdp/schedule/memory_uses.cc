#include "brigade/fsdp/schedule/memory_uses.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace brigade {
namespace {

constexpr int64_t kNotOver = -1;  // the end of a use
constexpr size_t kMostUses = size_t{1} << 17;
constexpr size_t kUnrecorded = std::numeric_limits<size_t>::max();

}  // namespace

Purpose purpose_of(GatheredIn pass) {
  switch (pass) {
    case GatheredIn::kForward:
      return Purpose::kForward;
    case GatheredIn::kBackward:
      return Purpose::kBackward;
    case GatheredIn::kOther:
      break;
  }
  return Purpose::kOther;
}

size_t UseRecord::begin(const MemoryUse& use, int64_t bytes) {
  ++num_begun_[use];
  if (uses_.size() == kMostUses) {
    is_overfull_ = true;
    return kUnrecorded;
  }
  uses_.push_back(
      {.use = use,
       .interval = {.begin = now_++, .end = kNotOver, .bytes = bytes}});
  return first_number_ + uses_.size() - 1;
}

void UseRecord::end(size_t number) {
  if (number == kUnrecorded) return;
  if (number < first_number_) {
    from_earlier_.erase(number);
  } else {
    uses_[number - first_number_].interval.end = now_++;
  }
}

size_t UseRecord::num_begun(const MemoryUse& use) const {
  const size_t* const found = num_begun_.find(use);
  return found == nullptr ? 0 : *found;
}

std::vector<RecordedUse> UseRecord::end_step() {
  const size_t first_number = first_number_;
  first_number_ += uses_.size();
  num_begun_ = {};
  std::vector<RecordedUse> step = std::exchange(uses_, {});
  const int64_t end = std::max<int64_t>(std::exchange(now_, 0), 1);
  if (std::exchange(is_overfull_, false)) return {};
  std::map<size_t, RecordedUse> from_this;
  for (size_t i = 0; i < step.size(); ++i) {
    if (step[i].interval.end != kNotOver) continue;
    step[i].interval.begin = 0;
    step[i].interval.end = end;
    from_this.emplace(first_number + i, step[i]);
  }
  for (const auto& [number, use] : from_earlier_) {
    step.push_back(use);
    step.back().interval.end = end;
  }
  from_earlier_.merge(from_this);
  return step;
}

}  // namespace brigade
