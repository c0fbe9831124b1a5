// Recorded order of a segment's collectives, and one rank's position in it.
//
// A segment is one forward or one backward. All ranks issue one sequence of
// all-gathers and reduce-scatters: the recorded schedule of the segment's tag,
// then rounds. In a round all ranks exchange RoundMessages, all-gather the
// units that some rank needs, and reduce-scatter the units whose gradients are
// complete. A segment without a schedule (learning) has rounds only; its
// sequence becomes the tag's schedule. The last round is the segment's status.
//
// A rank may block on any entry that it has issued, since all ranks issue
// entries in order. The schedule and this rank's needs alone decide which
// all-gather serves a need; timing does not. Ranks that repeat their programs
// need only the last round. Ranks with equal programs issue each entry at the
// same place, so the program may issue its own collectives in between.
//
//   SegmentCursor cursor(rules, &recorded);  // nullptr: learn
//   CursorActions actions = cursor.begin();
//   while (auto unit = cursor.need({&use, 1}, actions)) {
//     cursor.end_round(exchange(cursor.message(unit)), actions);
//   }
//
// Knows no tensors and no process groups. Thread safety: none.

#ifndef BRIGADE_FSDP_SCHEDULE_H_
#define BRIGADE_FSDP_SCHEDULE_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

namespace brigade {

// Returns a hash for comparison across ranks of one build; never 0.
uint64_t hash_of(std::span<const uint64_t> numbers);

struct ScheduleEntry {
  enum class Kind : uint8_t { kAllGather, kReduceScatter };

  Kind kind = Kind::kAllGather;
  size_t unit = 0;

  friend bool operator==(const ScheduleEntry&, const ScheduleEntry&) = default;
};

using Schedule = std::vector<ScheduleEntry>;

// Schedule of one tag, identical on all ranks.
struct RecordedSchedule {
  Schedule entries = {};
  // By entry: gradients that each rank accumulates before this reduce-scatter,
  // since the unit's previous one. 0 if ranks differed, and for all-gathers.
  std::vector<uint32_t> accumulations = {};

  uint64_t fingerprint() const;  // hash of the entries

  // Moves each all-gather before up to `prefetch_depth` - 1 reduce-scatters,
  // which would otherwise delay its prefetch: a unit's reduce-scatter is
  // recorded before the all-gather of the second unit after it.
  void advance_gathers(size_t prefetch_depth);
};

// Reshard and prefetch rules of one segment. Vectors are indexed by unit.
struct UnitRules {
  // The unit that contains it in the module tree. Use of a unit does not
  // release the units that contain it.
  std::vector<std::optional<size_t>> parents = {};
  // Stays unsharded until the segment ends. Empty: none.
  std::vector<char> stays = {};
  size_t prefetch_depth = 1;  // all-gathers issued ahead of the unit in use
  // Overrides prefetch_depth while the unit is in use. Empty: none.
  std::vector<size_t> prefetch_depths = {};

  size_t num_units() const { return parents.size(); }
  size_t greatest_depth() const;
};

struct CursorAction {
  enum class Kind : uint8_t {
    kAllGather,      // issue; acquire memory if the unit has none
    kReduceScatter,  // issue, with zeros if no gradient is accumulated
    kRelease,        // release the unit's memory
  };

  Kind kind;
  size_t unit;

  friend bool operator==(const CursorAction&, const CursorAction&) = default;
};

using CursorActions = std::vector<CursorAction>;

// One rank's message in a round.
struct RoundMessage {
  std::optional<size_t> need = std::nullopt;
  bool has_ended = false;  // finish() or fail() was called
  bool has_failed = false;
  // By unit: all expected gradients are accumulated and not yet reduced.
  std::vector<char> complete = {};
  std::vector<char> expects = {};  // by unit: more gradients
  // Hash of all counts of accumulated gradients; 0 unless learning.
  uint64_t accumulations = 0;
  // The caller sets these.
  std::vector<char> used = {};  // by parameter: has a gradient; empty: none
  std::string error = {};       // if has_failed
};

enum class RoundResult : uint8_t { kContinues, kEnded, kFailed };

// One rank's position in one segment. Calls append to `actions`, which the
// caller must carry out in order.
class SegmentCursor {
 public:
  // `recorded`: the schedule of all ranks; null: learn. `unsharded`: by unit,
  // held since an earlier segment; empty: none. `expected`: by unit, gradients
  // that this rank's open forwards lead to; empty: none.
  SegmentCursor(UnitRules rules, const RecordedSchedule* recorded,
                std::vector<char> unsharded = {},
                std::vector<uint32_t> expected = {});

  // Issues the first prefetch.
  CursorActions begin();

  // Unshards `units` for one operator and holds them until the next call.
  // Returns a unit that the rest of the schedule does not gather, if any: the
  // caller takes part in one round for it, then calls again.
  std::optional<size_t> need(std::span<const size_t> units,
                             CursorActions& actions);

  // Counts one accumulated gradient.
  void accumulated(size_t unit, CursorActions& actions);

  // Issues the rest of the schedule. The caller then takes part in rounds until
  // one returns kEnded or kFailed.
  void finish(CursorActions& actions);
  // Like finish(), after an error. Drops the accumulated gradients.
  void fail(CursorActions& actions);

  RoundMessage message(std::optional<size_t> need = std::nullopt) const;
  // `by_rank`: the messages of all ranks. REQUIRES: they include this rank's
  // message(), and need() returned a unit or finish() or fail() was called.
  RoundResult end_round(std::span<const RoundMessage> by_rank,
                        CursorActions& actions);

  // Whether it is unsharded or its all-gather is in flight.
  bool is_held(size_t unit) const {
    return claimed_[unit] != 0 || unclaimed_of(unit);
  }

  // The sequence issued in this segment; the tag's schedule after learning.
  const RecordedSchedule& record() const { return record_; }
  bool is_learning() const { return is_learning_; }
  // Whether rounds issued more than the schedule. All ranks then drop it.
  bool has_deviated() const {
    return !is_learning_ && record_.entries.size() > num_recorded_;
  }
  // Extra reduce-scatters for gradients that came after their scheduled one.
  size_t num_late() const { return num_late_; }
  size_t num_rounds() const { return num_rounds_; }

 private:
  using Kind = ScheduleEntry::Kind;

  bool stays(size_t unit) const {
    return !rules_.stays.empty() && rules_.stays[unit] != 0;
  }
  std::optional<size_t> unclaimed_of(size_t unit) const;
  bool is_pinned_or_contains_pinned(size_t unit) const;
  bool is_complete(size_t unit) const;
  bool may_reduce(size_t entry) const;

  void issue_next(CursorActions& actions);
  void issue_rest(CursorActions& actions);
  void advance(CursorActions& actions);
  std::optional<size_t> next_gather_of(size_t unit) const;
  void claim(size_t unit, size_t entry);
  void touch(size_t unit);
  void release_unless_held(size_t unit, CursorActions& actions) const;
  void release_used(CursorActions& actions);
  void drop_skipped(CursorActions& actions);
  void release_all(bool including_stays, CursorActions& actions);

  const UnitRules rules_;
  const bool is_learning_;
  RecordedSchedule record_;  // the schedule, then entries appended by rounds
  size_t num_recorded_;
  size_t num_issued_ = 0;  // of record_.entries

  std::vector<char> claimed_;   // by unit: used, and not released since
  std::vector<size_t> used_;    // claimed units, most recently used last
  std::vector<size_t> pinned_;  // units of the last need()
  bool is_settled_ = false;     // the last need() succeeded
  std::set<size_t> unclaimed_;  // entries: issued all-gathers not yet used
  size_t front_ = 0;            // after the last claimed entry
  size_t prefetch_depth_;

  // Gradients, by unit.
  std::vector<uint32_t> expected_;
  std::vector<uint32_t> accumulated_;  // since the last reduce-scatter
  std::vector<char> was_reduced_;

  bool has_ended_ = false;
  bool has_failed_ = false;
  size_t num_late_ = 0;
  size_t num_rounds_ = 0;
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_SCHEDULE_H_
