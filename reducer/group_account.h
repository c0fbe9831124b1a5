// Counter of the other collectives that a process group launches between an
// engine's own in a backward. Zeros for a failed iteration would meet them.
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_REDUCER_GROUP_ACCOUNT_H_
#define BRIGADE_REDUCER_GROUP_ACCOUNT_H_

#include <cstdint>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace brigade {

class GroupAccount {
 public:
  // `is_compared` is false where there are no peers: the group's count is not
  // read then.
  GroupAccount(c10::intrusive_ptr<c10d::ProcessGroup> group, bool is_compared);

  // A backward of an iteration begins: other collectives count from here.
  void begin();

  // Calls `launch`, which launches an engine's own collectives. If it throws
  // after it has launched something, nothing can be launched in its place.
  template <typename Launch>
  void count(const Launch& launch) {
    const std::optional<int64_t> before = group_count();
    note_others(before);
    try {
      launch();
    } catch (...) {
      if (before && group_count() != before) cannot_continue_ = true;
      throw;
    }
    if (!before) return;
    ++num_launches_;
    last_count_ = group_count().value_or(*before);
    add_to_hash(*last_count_ - *before);
  }

  // Ranks compare where other collectives lie between the launches: for hooks
  // that may launch some when others are complete.
  void compare_others(bool value) { compares_others_ = value; }

  // The iteration ends. Returns the hash that ranks compare; 0: none.
  uint64_t end();

  // Other collectives have been seen in the running or last backward.
  bool has_others() const { return has_others_; }

  void set_cannot_continue() { cannot_continue_ = true; }
  bool cannot_continue() const { return cannot_continue_; }

 private:
  std::optional<int64_t> group_count();
  void note_others(std::optional<int64_t> count);
  void note_if_others(std::optional<int64_t> count);
  void add_to_hash(int64_t num_collectives);

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  bool group_counts_;
  bool compares_others_ = false;
  bool cannot_continue_ = false;
  bool has_others_ = false;
  // Of the running iteration.
  int num_launches_ = 0;
  uint64_t hash_ = 0;
  std::optional<int64_t> last_count_;  // the group's, after the last launch
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_GROUP_ACCOUNT_H_
