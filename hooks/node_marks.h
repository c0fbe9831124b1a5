// A set of visited nodes that is emptied in no time, and a map of some nodes to
// numbers, in one table: a walk asks one question per edge.
//
// Open addressing with linear probing. A visited node's entry carries the walk
// in which it was made; in later walks it counts as free. Numbered nodes stay.
// They are entered before any other, so that no entry which may turn free ever
// lies between a numbered node's home and its place.
//
// Thread safety: none.

#ifndef BRIGADE_HOOKS_NODE_MARKS_H_
#define BRIGADE_HOOKS_NODE_MARKS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace brigade {

class NodeMarks {
 public:
  // What meet() returns besides a number.
  static constexpr uint32_t kNew = 0xffffffff;
  static constexpr uint32_t kVisited = 0xfffffffe;

  // Gives `node` a number below kVisited; false if it has one.
  // REQUIRES: no walk has begun. `node` is not null.
  bool number(const void* node, uint32_t number);

  // Begins a walk: no node is visited.
  void begin_walk();

  // Tells this walk from those before it, never 0. It is 1 in the first walk
  // and when it has run out of numbers: forget then what you know by it.
  uint32_t walk() const { return walk_; }

  // The number of `node` if it has one; else kNew if it was not visited in this
  // walk, and it is now; else kVisited.
  uint32_t meet(const void* node) {
    for (size_t i = home(node);; i = (i + 1) & mask_) {
      Entry& entry = entries_[i];
      if (entry.walk != walk_ && entry.number >= kVisited) {
        entry = {.node = node, .walk = walk_, .number = kVisited};
        if (++num_visited_ > max_visited_) grow();
        return kNew;
      }
      if (entry.node == node) return entry.number;
    }
  }

 private:
  struct Entry {
    const void* node = nullptr;
    uint32_t walk = 0;
    uint32_t number = kVisited;
  };

  size_t home(const void* node) const {
    return (reinterpret_cast<uintptr_t>(node) * uint64_t{0x9e3779b97f4a7c15}) >>
           shift_;
  }
  void grow();
  void insert(const Entry& entry);

  std::vector<Entry> entries_ = std::vector<Entry>(16);
  size_t mask_ = 15;
  int shift_ = 60;
  uint32_t walk_ = 0;
  size_t num_numbered_ = 0;
  size_t num_visited_ = 0;
  size_t max_visited_ = 8;
};

}  // namespace brigade

#endif  // BRIGADE_HOOKS_NODE_MARKS_H_
