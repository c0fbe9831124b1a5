// What an engine has launched on one of its groups since ranks compared last,
// and what else the group has launched in between.
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_ENGINE_STATE_GROUP_ACCOUNT_H_
#define BRIGADE_ENGINE_STATE_GROUP_ACCOUNT_H_

#include <cstdint>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "brigade/comm/control/rank_status.h"

namespace brigade {

class GroupAccount {
 public:
  // `is_compared`: false, nobody compares what the group counts, and it is not
  // asked.
  // Counts from the first restart() on.
  GroupAccount(c10::intrusive_ptr<c10d::ProcessGroup> group, bool is_compared);

  // Calls `launch` and counts it, with its collectives, as one of those that
  // all ranks launch. If it throws after it has launched something, that
  // belongs to no launch, and what this rank has launched can't be told any
  // more.
  template <typename Launch>
  void count(const Launch& launch) {
    const std::optional<int64_t> before = group_count();
    note_others(before);
    try {
      launch();
    } catch (...) {
      if (before && group_count() != before) launches_ = kAbortedGroup;
      throw;
    }
    if (launches_ != kAbortedGroup) ++launches_;
    if (!before) return;
    const int64_t own = group_count().value_or(*before) - *before;
    if (counted_from_) *counted_from_ += own;
    add_to_digest(own);
    last_count_ = *before + own;
  }

  // Calls `launch` of an opening of this form, whose collectives are others'
  // that are told of.
  template <typename Launch>
  void open(uint64_t form, const Launch& launch) {
    const std::optional<int64_t> before = group_count();
    launch();
    const int64_t own =
        before ? group_count().value_or(*before) - *before : int64_t{1};
    opening_ = {.num_collectives = static_cast<uint16_t>(own),
                .form = static_cast<uint16_t>(form)};
  }

  // What this rank has launched can't be told any more.
  void abort() { launches_ = kAbortedGroup; }

  // Where the group's other collectives lie between the launches is told, too.
  void compare_others(bool value) { compares_others_ = value; }

  // Peers would see from what is told of it that they lack an opening.
  bool tells_openings() { return !is_compared_ || group_count().has_value(); }

  // Collectives that the group has launched since the last take() or restart()
  // and that are no launches', if it counts them.
  std::optional<int64_t> foreign();

  // Of these an opening.
  OpeningTold opening() const { return opening_; }

  struct Told {
    GroupCounts counts = {};
    OpeningTold opening = {};
    uint64_t others = 0;  // a digest of where they lie; 0: not compared
  };

  // Since the last call or restart(); counts anew from here.
  Told take();

  // All ranks stand in the same place.
  void restart();

 private:
  std::optional<int64_t> group_count();
  void note_others(std::optional<int64_t> count);
  void add_to_digest(int64_t num_collectives);

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const bool is_compared_;
  bool group_counts_;
  bool compares_others_ = false;
  // What the group's count would be without others' collectives.
  std::optional<int64_t> counted_from_;
  int32_t launches_ = 0;
  OpeningTold opening_;
  uint64_t others_ = 0;
  std::optional<int64_t> last_count_;  // the group's, at the last launch
};

}  // namespace brigade

#endif  // BRIGADE_ENGINE_STATE_GROUP_ACCOUNT_H_
