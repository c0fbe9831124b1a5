// Agreed order of a segment's collectives, and each rank's position in it.
//
// A segment is one forward or one backward. Every rank issues the same sequence
// of all-gathers and reduce-scatters, whatever its program uses: the recorded
// schedule of the segment's tag, in order, then rounds. In a round ranks
// exchange one message each; all gather the units that some rank needs, and
// reduce those whose gradients are complete. A segment without a schedule
// consists of rounds only, and its sequence is the schedule of the next segment
// with this tag. The last round is the segment's status.
//
// Every rank issues each entry after all entries before it. So a rank may block
// on any entry that it has issued. The schedule and the needs of this rank
// alone decide which all-gather satisfies a need, not prefetch or timing: ranks
// that repeat their programs have no round but the last one. Ranks with equal
// programs issue each entry at the same place in them, so that a collective of
// the program's own may lie between.
//
//   SegmentCursor cursor(rules, &recorded);  // nullptr: learn
//   CursorActions todo = cursor.begin();     // issues the prefetch
//   while (auto unit = cursor.need({&use, 1}, todo)) {
//     todo += cursor.end_round(exchange(cursor.message(unit)));
//   }
//
// Knows no tensors and no groups. Thread safety: none.

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

// Compared across ranks, which run one build. Never 0.
uint64_t hash_of(std::span<const uint64_t> numbers);

struct ScheduleEntry {
  enum class Kind : uint8_t { kAllGather, kReduceScatter };

  Kind kind = Kind::kAllGather;
  size_t unit = 0;

  friend bool operator==(const ScheduleEntry&, const ScheduleEntry&) = default;
};

using Schedule = std::vector<ScheduleEntry>;

// The same on all ranks.
struct RecordedSchedule {
  Schedule entries = {};
  // By entry: gradients that each rank accumulated in the unit before the
  // reduce-scatter, since the one before. 0 for an all-gather, and for all
  // entries if ranks differed.
  std::vector<uint32_t> accumulations = {};

  uint64_t fingerprint() const;  // hash_of() the entries
};

// When units are released, and how far ahead they are gathered.
struct UnitRules {
  // By unit: the unit that contains it in the module tree; none: outermost.
  // Using a unit does not release the units around it.
  std::vector<std::optional<size_t>> parents = {};
  // By unit: stays unsharded to the segment's end once gathered. Empty: none.
  std::vector<char> stays = {};
  // All-gathers issued ahead of the one in use.
  size_t prefetch_depth = 1;
  // By unit: the same while it is the one in use. Empty: as above.
  std::vector<size_t> prefetch_depths = {};

  size_t num_units() const { return parents.size(); }
};

struct CursorAction {
  enum class Kind : uint8_t {
    kAllGather,      // issue; the unit's memory is taken if it has none
    kReduceScatter,  // issue: of what is accumulated, zeros if nothing is
    kRelease,        // the unit's memory is free
  };

  Kind kind;
  size_t unit;

  friend bool operator==(const CursorAction&, const CursorAction&) = default;
};

using CursorActions = std::vector<CursorAction>;

// One rank's part of a round.
struct RoundMessage {
  std::optional<size_t> need = std::nullopt;
  bool has_ended = false;  // its program's part of the segment
  bool has_failed = false;
  // By unit: gradients wait for a reduce-scatter, all that are expected.
  std::vector<char> complete = {};
  // By unit: more gradients are expected.
  std::vector<char> expects = {};
  // Hash of this rank's RecordedSchedule::accumulations, and of the gradients
  // that it has accumulated since.
  uint64_t accumulations = 0;
  // Of the caller's; by parameter of the model: has a gradient. Empty: none.
  std::vector<char> used = {};
  std::string error = {};  // of the caller's: has_failed
};

enum class RoundResult : uint8_t { kGoesOn, kEnded, kFailed };

// One rank's position in one segment.
class SegmentCursor {
 public:
  // `recorded`: the agreed schedule; null: learn. `unsharded`: by unit, held
  // from earlier segments; empty: none. `expected`: by unit, accumulations that
  // this rank's open forwards lead to; empty: none, as in a forward.
  SegmentCursor(UnitRules rules, const RecordedSchedule* recorded,
                std::vector<char> unsharded = {},
                std::vector<uint32_t> expected = {});

  // Issues what goes ahead of the first need.
  CursorActions begin();

  // One operator is about to use `units`, which are held until the next call.
  // Appends to `actions`. Returns a unit that is not in the schedule: the
  // caller takes part in one round for it, then calls again.
  std::optional<size_t> need(std::span<const size_t> units,
                             CursorActions& actions);

  // A gradient was accumulated in `unit`.
  void accumulated(size_t unit, CursorActions& actions);

  // The program's part has ended: issues the rest. The caller then takes part
  // in rounds until they end.
  void finish(CursorActions& actions);
  // The same after an error: what is accumulated is dropped.
  void fail(CursorActions& actions);

  RoundMessage message(std::optional<size_t> need = std::nullopt) const;
  // `of_ranks`: the messages of all ranks. REQUIRES: one is message() of this
  // rank, and the rest of the schedule is issued: need() returned a unit, or
  // finish() or fail() was called.
  RoundResult end_round(std::span<const RoundMessage> of_ranks,
                        CursorActions& actions);

  // It is unsharded, or its all-gather is under way.
  bool is_held(size_t unit) const {
    return claimed_[unit] != 0 || unclaimed_of(unit);
  }

  // What the segment has issued, to be stored if it was learning.
  const RecordedSchedule& record() const { return record_; }
  bool is_learning() const { return is_learning_; }
  // Rounds have issued more than the recorded schedule: all ranks drop it.
  bool has_deviated() const {
    return !is_learning_ && record_.entries.size() > num_recorded_;
  }
  // Reduce-scatters that were issued before this rank's gradients of the unit
  // were complete, and got gradients later.
  size_t num_late() const { return num_late_; }
  size_t num_rounds() const { return num_rounds_; }

 private:
  using Kind = ScheduleEntry::Kind;

  bool stays(size_t unit) const {
    return !rules_.stays.empty() && rules_.stays[unit] != 0;
  }
  std::optional<size_t> unclaimed_of(size_t unit) const;
  bool is_pinned_or_around(size_t unit) const;
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
  void release_all(bool with_those_that_stay, CursorActions& actions);

  const UnitRules rules_;
  const bool is_learning_;
  RecordedSchedule record_;  // the schedule, and what rounds append
  size_t num_recorded_;
  size_t num_issued_ = 0;  // of record_.entries

  // Units. Claimed: used, and not released since.
  std::vector<char> claimed_;
  std::vector<size_t> used_;    // claimed units, the last one used at the end
  std::vector<size_t> pinned_;  // of the operator that runs
  bool is_settled_ = false;     // the last need() has its units
  // Entries: issued all-gathers that no need has claimed and that are not
  // dropped.
  std::set<size_t> unclaimed_;
  size_t front_ = 0;  // after the last claimed entry
  size_t depth_;      // of prefetch

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
