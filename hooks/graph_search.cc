#include "brigade/hooks/graph_search.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "brigade/hooks/autograd_node.h"

namespace brigade {

using torch::autograd::Edge;
using torch::autograd::Node;

// A set of visited nodes that is emptied in no time, and a map of some nodes to
// numbers, in one table: a walk asks one question per edge.
//
// Open addressing with linear probing. A visited node's entry carries the walk
// in which it was made; in later walks it counts as free. Numbered nodes stay.
// They are entered before any other, so that no entry which may turn free ever
// lies between a numbered node's home and its place.
class GraphSearch::NodeMarks {
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

bool GraphSearch::NodeMarks::number(const void* node, uint32_t number) {
  for (size_t i = home(node); entries_[i].node; i = (i + 1) & mask_) {
    if (entries_[i].node == node) return false;
  }
  insert({.node = node, .walk = 0, .number = number});
  ++num_numbered_;
  if (num_numbered_ + 1 > max_visited_) grow();
  return true;
}

void GraphSearch::NodeMarks::begin_walk() {
  num_visited_ = num_numbered_;
  if (++walk_ == 0) {
    for (Entry& entry : entries_) entry.walk = 0;
    walk_ = 1;
  }
}

// At most half of the entries are taken.
void GraphSearch::NodeMarks::grow() {
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

void GraphSearch::NodeMarks::insert(const Entry& entry) {
  size_t i = home(entry.node);
  while (entries_[i].node) i = (i + 1) & mask_;
  entries_[i] = entry;
}

GraphSearch::GraphSearch(std::span<Node* const> accumulators)
    : marks_(std::make_unique<NodeMarks>()),
      reached_in_walk_(accumulators.size(), 0) {
  TORCH_CHECK_VALUE(accumulators.size() < NodeMarks::kVisited,
                    "GraphSearch: expected fewer than ", NodeMarks::kVisited,
                    " parameters, got ", accumulators.size(),
                    ".\nSearch for some of them at a time.");
  for (size_t i = 0; i < accumulators.size(); ++i) {
    TORCH_CHECK_VALUE(accumulators[i],
                      "GraphSearch: expected the gradient accumulator of "
                      "parameter ",
                      i,
                      ", got null.\nGive only leaves that require a gradient.");
    TORCH_CHECK_VALUE(
        marks_->number(accumulators[i], static_cast<uint32_t>(i)),
        "GraphSearch: expected one gradient accumulator per parameter, got "
        "that of parameter ",
        i, " twice.\nList a shared parameter once.");
  }
}

GraphSearch::~GraphSearch() = default;

std::span<const size_t> GraphSearch::unreached(
    std::span<const at::Tensor> outputs) {
  marks_->begin_walk();
  if (marks_->walk() == 1) {
    std::fill(reached_in_walk_.begin(), reached_in_walk_.end(), 0);
  }
  num_unreached_ = reached_in_walk_.size();
  to_visit_.clear();
  bool all_reached = num_unreached_ == 0;
  for (const at::Tensor& output : outputs) {
    if (all_reached) break;
    if (!output.defined()) continue;
    // An accumulator made here would be none of ours.
    const NodePtr root =
        output.grad_fn()
            ? output.grad_fn()
            : torch::autograd::impl::try_get_grad_accumulator(output);
    if (root) all_reached = meet(root.get()) || walk();
  }
  unreached_.swap(unreached_before_);
  unreached_.clear();
  if (!all_reached) {
    for (size_t i = 0; i < reached_in_walk_.size(); ++i) {
      if (reached_in_walk_[i] != marks_->walk()) unreached_.push_back(i);
    }
  }
  repeated_ = searched_ && unreached_ == unreached_before_;
  searched_ = true;
  return unreached_;
}

// Accumulators are known by their address: their memory is not touched.
inline bool GraphSearch::meet(Node* node) {
  const uint32_t number = marks_->meet(node);
  if (number == NodeMarks::kVisited) return false;
  if (number == NodeMarks::kNew) {
    __builtin_prefetch(&node->next_edges());
    to_visit_.push_back(node);
    return false;
  }
  uint32_t& reached = reached_in_walk_[number];
  if (reached == marks_->walk()) return false;
  reached = marks_->walk();
  return --num_unreached_ == 0;
}

bool GraphSearch::walk() {
  while (!to_visit_.empty()) {
    Node* node = to_visit_.back();
    to_visit_.pop_back();
    for (const Edge& edge : node->next_edges()) {
      if (edge.function && meet(edge.function.get())) return true;
    }
  }
  return false;
}

}  // namespace brigade
