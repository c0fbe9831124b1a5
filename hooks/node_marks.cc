#include "brigade/hooks/node_marks.h"

#include <algorithm>
#include <utility>

namespace brigade {

bool NodeMarks::number(const void* node, uint32_t number) {
  for (size_t i = home(node); entries_[i].node; i = (i + 1) & mask_) {
    if (entries_[i].node == node) return false;
  }
  insert({.node = node, .walk = 0, .number = number});
  ++num_numbered_;
  if (num_numbered_ + 1 > max_visited_) grow();
  return true;
}

void NodeMarks::begin_walk() {
  num_visited_ = num_numbered_;
  if (++walk_ == 0) {
    for (Entry& entry : entries_) entry.walk = 0;
    walk_ = 1;
  }
}

// At most half of the entries are taken.
void NodeMarks::grow() {
  std::vector<Entry> old =
      std::exchange(entries_, std::vector<Entry>(entries_.size() * 2));
  mask_ = entries_.size() - 1;
  --shift_;
  max_visited_ = entries_.size() / 2;
  for (const Entry& entry : old) {
    if (entry.number < kVisited) insert(entry);
  }
  for (const Entry& entry : old) {
    if (entry.number == kVisited && entry.node && entry.walk == walk_) {
      insert(entry);
    }
  }
}

void NodeMarks::insert(const Entry& entry) {
  size_t i = home(entry.node);
  while (entries_[i].node) i = (i + 1) & mask_;
  entries_[i] = entry;
}

}  // namespace brigade
