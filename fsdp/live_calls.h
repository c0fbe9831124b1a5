// Of which units a backward may bring gradients on this rank: those that graphs
// hold calls of. What no graph holds need not be waited for.
//
// A graph may also be there unseen: where calls are computed again in backward,
// and where an output is nothing that is looked at. So a unit counts, too, if a
// call of it was, or may be, without a graph, and if it was called since its
// shards were written and any graph was left.
//
// Thread safety: none; graphs may end on any thread.

#ifndef BRIGADE_FSDP_LIVE_CALLS_H_
#define BRIGADE_FSDP_LIVE_CALLS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace brigade {

class LiveCalls {
 public:
  explicit LiveCalls(size_t num_units) : units_(num_units) {}

  // A unit is called, whose shards have been written so often. `has_graph`:
  // false if it is computed again in backward, or may be. Returns what its
  // graph holds.
  std::shared_ptr<void> begin(size_t unit, int64_t num_writes, bool has_graph);

  // A backward is over.
  void backward_over();

  bool may_bring_gradients(size_t unit, int64_t num_writes) const {
    const Unit& asked = units_[unit];
    return asked.is_recomputed || is_held(asked) ||
           asked.called_behind == num_writes;
  }

 private:
  struct Unit {
    std::shared_ptr<char> held = std::make_shared<char>();  // by graphs, too
    std::optional<int64_t> called_behind = std::nullopt;    // so many writes
    bool is_recomputed = false;
  };

  static bool is_held(const Unit& unit) { return unit.held.use_count() > 1; }

  std::vector<Unit> units_;
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_LIVE_CALLS_H_
