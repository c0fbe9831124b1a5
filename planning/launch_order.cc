#include "brigade/planning/launch_order.h"

#include <algorithm>
#include <utility>

namespace brigade {

LaunchOrder::LaunchOrder(std::vector<Entry> entries)
    : entries_(std::move(entries)) {
  uint32_t last_group = 0;
  for (const Entry& entry : entries_) {
    last_group = std::max(last_group, entry.group);
  }
  for (uint32_t group = 0; group <= last_group; ++group) {
    next_.push_back(find(group, /*from=*/0));
  }
}

void LaunchOrder::mark_all() {
  for (Entry& entry : entries_) entry.num_pending = 0;
}

std::optional<size_t> LaunchOrder::next() const {
  for (const size_t entry : next_) {
    if (entry < entries_.size() && entries_[entry].num_pending == 0) {
      return entry;
    }
  }
  return std::nullopt;
}

void LaunchOrder::launched(size_t entry) {
  const uint32_t group = entries_[entry].group;
  next_[group] = find(group, entry + 1);
}

bool LaunchOrder::all_launched() const {
  return std::ranges::all_of(
      next_, [this](size_t entry) { return entry == entries_.size(); });
}

size_t LaunchOrder::find(uint32_t group, size_t from) const {
  while (from < entries_.size() && entries_[from].group != group) ++from;
  return from;
}

}  // namespace brigade
