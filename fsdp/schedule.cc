#include "brigade/fsdp/schedule.h"

#include <algorithm>
#include <functional>
#include <string_view>
#include <utility>

namespace brigade {

uint64_t hash_of(std::span<const uint64_t> numbers) {
  const std::string_view bytes(reinterpret_cast<const char*>(numbers.data()),
                               numbers.size_bytes());
  return std::max<uint64_t>(std::hash<std::string_view>()(bytes), 1);
}

uint64_t RecordedSchedule::fingerprint() const {
  std::vector<uint64_t> numbers;
  for (const auto& [kind, unit] : entries) {
    numbers.push_back(unit * 2 + static_cast<uint64_t>(kind));
  }
  return hash_of(numbers);
}

void RecordedSchedule::advance_gathers(size_t prefetch_depth) {
  using Kind = ScheduleEntry::Kind;
  for (size_t i = 0; i < entries.size(); ++i) {
    if (entries[i].kind != Kind::kAllGather) continue;
    for (size_t to = i; to > 0 && i - to + 1 < prefetch_depth &&
                        entries[to - 1].kind == Kind::kReduceScatter;
         --to) {
      std::swap(entries[to - 1], entries[to]);
      std::swap(accumulations[to - 1], accumulations[to]);
    }
  }
}

size_t UnitRules::greatest_depth() const {
  return std::max(prefetch_depth, prefetch_depths.empty()
                                      ? 0
                                      : std::ranges::max(prefetch_depths));
}

SegmentCursor::SegmentCursor(UnitRules rules, const RecordedSchedule* recorded,
                             std::vector<char> unsharded,
                             std::vector<uint32_t> expected)
    : rules_(std::move(rules)),
      is_learning_(recorded == nullptr),
      record_(recorded == nullptr ? RecordedSchedule() : *recorded),
      num_recorded_(record_.entries.size()),
      claimed_(std::move(unsharded)),
      prefetch_depth_(rules_.prefetch_depth),
      expected_(std::move(expected)),
      accumulated_(rules_.num_units(), 0),
      was_reduced_(rules_.num_units(), 0) {
  claimed_.resize(rules_.num_units(), 0);
  expected_.resize(rules_.num_units(), 0);
}

CursorActions SegmentCursor::begin() {
  CursorActions actions;
  advance(actions);
  return actions;
}

std::optional<size_t> SegmentCursor::need(std::span<const size_t> units,
                                          CursorActions& actions) {
  if (is_settled_ && units.size() == 1 && !used_.empty() &&
      used_.back() == units[0]) {
    return std::nullopt;
  }
  is_settled_ = false;
  pinned_.assign(units.begin(), units.end());
  release_used(actions);
  for (const size_t unit : units) {
    if (claimed_[unit] != 0) {
      touch(unit);
      continue;
    }
    std::optional<size_t> entry = unclaimed_of(unit);
    if (!entry) entry = next_gather_of(unit);
    if (!entry) {
      issue_rest(actions);
      return unit;
    }
    while (num_issued_ <= *entry) issue_next(actions);
    claim(unit, *entry);
  }
  drop_skipped(actions);
  advance(actions);
  is_settled_ = true;
  return std::nullopt;
}

void SegmentCursor::accumulated(size_t unit, CursorActions& actions) {
  if (has_failed_) return;
  ++accumulated_[unit];
  advance(actions);
}

void SegmentCursor::finish(CursorActions& actions) {
  has_ended_ = true;
  release_all(/*including_stays=*/false, actions);
  issue_rest(actions);
}

void SegmentCursor::fail(CursorActions& actions) {
  has_failed_ = true;
  std::fill(accumulated_.begin(), accumulated_.end(), 0);
  finish(actions);
}

RoundMessage SegmentCursor::message(std::optional<size_t> need) const {
  RoundMessage message = {
      .need = need, .has_ended = has_ended_, .has_failed = has_failed_};
  if (is_learning_) {
    std::vector<uint64_t> counts(record_.accumulations.begin(),
                                 record_.accumulations.end());
    counts.insert(counts.end(), accumulated_.begin(), accumulated_.end());
    message.accumulations = hash_of(counts);
  }
  for (size_t unit = 0; unit < rules_.num_units(); ++unit) {
    const bool expects = !has_ended_ && expected_[unit] > 0 &&
                         was_reduced_[unit] == 0 && !is_complete(unit);
    message.complete.push_back(is_complete(unit) ? 1 : 0);
    message.expects.push_back(expects ? 1 : 0);
  }
  return message;
}

RoundResult SegmentCursor::end_round(std::span<const RoundMessage> by_rank,
                                     CursorActions& actions) {
  ++num_rounds_;
  if (std::ranges::any_of(by_rank, &RoundMessage::has_failed)) {
    has_failed_ = has_ended_ = true;
    release_all(/*including_stays=*/true, actions);
    return RoundResult::kFailed;
  }
  bool has_ended = true;
  bool has_equal_counts = true;
  std::set<size_t> needs;
  std::vector<char> complete(rules_.num_units(), 0);
  std::vector<char> expected(rules_.num_units(), 0);
  for (const RoundMessage& message : by_rank) {
    has_ended &= message.has_ended;
    has_equal_counts &= message.accumulations == by_rank[0].accumulations;
    if (message.need) needs.insert(*message.need);
    for (size_t unit = 0; unit < rules_.num_units(); ++unit) {
      complete[unit] |= message.complete[unit];
      expected[unit] |= message.expects[unit];
    }
  }

  const auto append = [&](Kind kind, size_t unit) {
    record_.entries.push_back({.kind = kind, .unit = unit});
    record_.accumulations.push_back(
        kind == Kind::kReduceScatter ? accumulated_[unit] : 0);
    issue_next(actions);
  };
  for (const size_t unit : needs) append(Kind::kAllGather, unit);
  for (const size_t unit : pinned_) {
    if (!has_ended_ && needs.contains(unit) && claimed_[unit] == 0) {
      claim(unit, *unclaimed_of(unit));
    }
  }
  // Backward order, since the next backward replays this sequence.
  for (size_t unit = rules_.num_units(); unit-- > 0;) {
    if (complete[unit] == 0 || expected[unit] != 0) continue;
    if (!is_learning_ && accumulated_[unit] > 0) ++num_late_;
    append(Kind::kReduceScatter, unit);
  }
  if (!has_ended) return RoundResult::kContinues;
  if (!has_equal_counts) std::ranges::fill(record_.accumulations, 0);
  release_all(/*including_stays=*/false, actions);
  return RoundResult::kEnded;
}

std::optional<size_t> SegmentCursor::unclaimed_of(size_t unit) const {
  for (const size_t entry : unclaimed_) {
    if (record_.entries[entry].unit == unit) return entry;
  }
  return std::nullopt;
}

void SegmentCursor::release_unless_held(size_t unit,
                                        CursorActions& actions) const {
  if (is_held(unit)) return;
  actions.push_back({CursorAction::Kind::kRelease, unit});
}

bool SegmentCursor::is_pinned_or_contains_pinned(size_t unit) const {
  for (const size_t pinned : pinned_) {
    std::optional<size_t> ancestor = pinned;
    while (ancestor && *ancestor != unit) ancestor = rules_.parents[*ancestor];
    if (ancestor) return true;
  }
  return false;
}

bool SegmentCursor::is_complete(size_t unit) const {
  const uint32_t enough = has_ended_ ? 1 : std::max(1U, expected_[unit]);
  return accumulated_[unit] >= enough;
}

bool SegmentCursor::may_reduce(size_t entry) const {
  const size_t unit = record_.entries[entry].unit;
  if (expected_[unit] == 0) return true;
  const uint32_t recorded = record_.accumulations[entry];
  return accumulated_[unit] >= (recorded > 0 ? recorded : expected_[unit]);
}

void SegmentCursor::issue_next(CursorActions& actions) {
  const size_t place = num_issued_++;
  const auto [kind, unit] = record_.entries[place];
  if (kind == Kind::kReduceScatter) {
    actions.push_back({CursorAction::Kind::kReduceScatter, unit});
    accumulated_[unit] = 0;
    was_reduced_[unit] = 1;
    return;
  }
  actions.push_back({CursorAction::Kind::kAllGather, unit});
  if (!has_ended_ || (stays(unit) && !has_failed_)) {
    unclaimed_.insert(place);
  } else {
    release_unless_held(unit, actions);
  }
}

void SegmentCursor::issue_rest(CursorActions& actions) {
  while (num_issued_ < record_.entries.size()) {
    issue_next(actions);
    front_ = num_issued_;
    drop_skipped(actions);
  }
}

void SegmentCursor::advance(CursorActions& actions) {
  while (num_issued_ < record_.entries.size()) {
    if (record_.entries[num_issued_].kind == Kind::kReduceScatter) {
      if (!may_reduce(num_issued_)) return;
    } else {
      const auto num_ahead = static_cast<size_t>(
          std::distance(unclaimed_.lower_bound(front_), unclaimed_.end()));
      if (num_ahead >= prefetch_depth_) return;
    }
    issue_next(actions);
  }
}

std::optional<size_t> SegmentCursor::next_gather_of(size_t unit) const {
  for (size_t i = num_issued_; i < record_.entries.size(); ++i) {
    if (record_.entries[i] == ScheduleEntry{Kind::kAllGather, unit}) return i;
  }
  return std::nullopt;
}

void SegmentCursor::claim(size_t unit, size_t entry) {
  unclaimed_.erase(entry);
  claimed_[unit] = 1;
  front_ = std::max(front_, entry + 1);
  if (!rules_.prefetch_depths.empty()) {
    prefetch_depth_ = rules_.prefetch_depths[unit];
  }
  touch(unit);
}

void SegmentCursor::touch(size_t unit) {
  if (stays(unit)) return;
  std::erase(used_, unit);
  used_.push_back(unit);
}

// If all pinned units stay, keeps the most recently used other unit too.
void SegmentCursor::release_used(CursorActions& actions) {
  bool keeps_one =
      std::ranges::all_of(pinned_, [this](size_t unit) { return stays(unit); });
  for (size_t i = used_.size(); i-- > 0;) {
    const size_t unit = used_[i];
    if (is_pinned_or_contains_pinned(unit)) continue;
    if (std::exchange(keeps_one, false)) continue;
    used_.erase(used_.begin() + static_cast<std::ptrdiff_t>(i));
    claimed_[unit] = 0;
    release_unless_held(unit, actions);
  }
}

// Drops the gathers that this rank has passed over, except the last one: a rank
// that uses units in another order may need it next.
void SegmentCursor::drop_skipped(CursorActions& actions) {
  std::vector<size_t> skipped;
  for (const size_t entry : unclaimed_) {
    if (entry >= front_) break;
    if (!stays(record_.entries[entry].unit)) skipped.push_back(entry);
  }
  if (skipped.empty()) return;
  skipped.pop_back();
  for (const size_t entry : skipped) {
    unclaimed_.erase(entry);
    release_unless_held(record_.entries[entry].unit, actions);
  }
}

void SegmentCursor::release_all(bool including_stays, CursorActions& actions) {
  for (size_t unit = 0; unit < rules_.num_units(); ++unit) {
    if (!is_held(unit) || (stays(unit) && !including_stays)) continue;
    claimed_[unit] = 0;
    std::erase_if(unclaimed_, [&](size_t entry) {
      return record_.entries[entry].unit == unit;
    });
    actions.push_back({CursorAction::Kind::kRelease, unit});
  }
  used_.clear();
}

}  // namespace brigade
