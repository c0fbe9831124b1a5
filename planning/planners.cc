#include "brigade/planning/planners.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <queue>
#include <set>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"

namespace brigade {
namespace {

template <typename... Parts>
absl::Status bad_input(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat("planner: ", parts...));
}

// The gradients that may share buckets, in order. A sparse one is a kind of
// its own.
struct Gradients {
  std::vector<size_t> positions = {};  // in Backward::order
  std::vector<double> ready_s = {};
  std::vector<int64_t> bytes_before = {0};  // [j]: of the first j gradients

  size_t size() const { return positions.size(); }

  void add(const Backward& backward, size_t position) {
    positions.push_back(position);
    ready_s.push_back(backward.ready_s[position]);
    bytes_before.push_back(
        bytes_before.back() +
        backward.parameters[backward.order[position]].size_bytes);
  }
};

std::vector<Gradients> kinds_of(const Backward& backward) {
  std::vector<Gradients> kinds;
  std::map<int, size_t> by_kind;
  for (size_t position = 0; position < backward.order.size(); ++position) {
    const ParameterSpec& spec = backward.parameters[backward.order[position]];
    size_t number = kinds.size();
    if (!spec.sparse) number = by_kind.emplace(spec.kind, number).first->second;
    if (number == kinds.size()) kinds.emplace_back();
    kinds[number].add(backward, position);
  }
  return kinds;
}

// By kind, the ends of its buckets (numbers of gradients), ascending.
using Cuts = std::vector<std::vector<size_t>>;

struct Bucket {
  size_t last_position = 0;
  double ready_s = 0;
  int64_t bytes = 0;
  size_t kind = 0;
  size_t begin = 0;  // of its gradients in the kind
  size_t end = 0;
};

// Returns the buckets in order of launch.
std::vector<Bucket> buckets_of(const std::vector<Gradients>& kinds,
                               const Cuts& cuts) {
  std::vector<Bucket> buckets;
  for (size_t k = 0; k < kinds.size(); ++k) {
    const Gradients& kind = kinds[k];
    size_t begin = 0;
    for (const size_t end : cuts[k]) {
      buckets.push_back(
          {.last_position = kind.positions[end - 1],
           .ready_s = kind.ready_s[end - 1],
           .bytes = kind.bytes_before[end] - kind.bytes_before[begin],
           .kind = k,
           .begin = begin,
           .end = end});
      begin = end;
    }
  }
  std::ranges::sort(buckets, {}, &Bucket::last_position);
  return buckets;
}

// One step: backward, and a link that runs collectives in order, `concurrency`
// at once: latencies overlap, bytes don't.
class Step {
 public:
  Step(const Backward& backward, const CollectiveCost& cost)
      : cost_(cost),
        latency_s_(cost.seconds(0)),
        slowdown_(backward.contention.backward_slowdown),
        stretch_(backward.contention.collective_stretch),
        backward_end_s_(backward.end_s) {
    for (int i = 0; i < cost.concurrency(); ++i) slots_.push(0);
  }

  // Runs a collective that is launched after the earlier ones, when backward
  // has done `ready_s` of its work.
  StepPrediction::Collective run(double ready_s, int64_t bytes) {
    ready_s_ = std::max(ready_s_, ready_s);
    const double launched_s = time_of(ready_s_);
    const double begin = std::max(slots_.top(), launched_s);
    slots_.pop();
    const double moving_s = std::max(free_s_, begin + latency_s_);
    const double busy_s = std::max(begin, free_s_);
    const double end =
        stretched_end(busy_s, moving_s + (cost_.seconds(bytes) - latency_s_));
    add_busy(busy_s, end);
    free_s_ = end;
    slots_.push(end);
    return {.launched_s = launched_s, .complete_s = end};
  }

  double backward_end_s() const { return backward_end_s_; }
  double end_s() const { return std::max(backward_end_s_, free_s_); }

 private:
  struct Interval {
    double begin = 0;
    double end = 0;
  };

  // Returns the time at which backward has done `work_s`. Calls don't decrease.
  double time_of(double work_s) {
    if (slowdown_ == 0) return work_s;
    for (; !busy_.empty(); busy_.pop_front()) {
      const auto [begin, end] = busy_.front();
      const double slowed_s = work_s + delay_s_ - begin;  // work after `begin`
      if (slowed_s <= (end - begin) * (1 - slowdown_)) {
        return begin + (slowed_s <= 0 ? slowed_s : slowed_s / (1 - slowdown_));
      }
      delay_s_ += slowdown_ * (end - begin);
    }
    return work_s + delay_s_;
  }

  // Returns the end of backward if the link is busy from `begin` on.
  double backward_end_after(double begin) const {
    const double left_s = backward_end_s_ - begin;
    return begin + (left_s <= 0 ? left_s : left_s / (1 - slowdown_));
  }

  // `end`: of a collective that backward does not slow.
  double stretched_end(double begin, double end) const {
    const double overlap_s = backward_end_after(begin) - begin;
    if (stretch_ == 1 || overlap_s <= 0) return end;
    const double stretched_s = stretch_ * (end - begin);
    return stretched_s <= overlap_s ? begin + stretched_s
                                    : end + overlap_s - overlap_s / stretch_;
  }

  void add_busy(double begin, double end) {
    if (slowdown_ == 0 || end <= begin) return;
    busy_.push_back({begin, end});
    backward_end_s_ =
        std::min(std::max(backward_end_s_, backward_end_after(begin)),
                 backward_end_s_ + slowdown_ * (end - begin));
  }

  const CollectiveCost& cost_;
  const double latency_s_;
  const double slowdown_;
  const double stretch_;
  double backward_end_s_;  // given the collectives so far
  double ready_s_ = 0;
  double free_s_ = 0;
  double delay_s_ = 0;              // of backward, before busy_
  std::deque<Interval> busy_ = {};  // that time_of() has not passed
  std::priority_queue<double, std::vector<double>, std::greater<>> slots_;
};

double end_of(const std::vector<Gradients>& kinds, const Cuts& cuts,
              const Backward& backward, const CollectiveCost& cost) {
  Step step(backward, cost);
  for (const Bucket& bucket : buckets_of(kinds, cuts)) {
    step.run(bucket.ready_s, bucket.bytes);
  }
  return step.end_s();
}

// ---- Exact optimum for one kind and one collective at a time.
//
// f(j): the earliest end of collectives that send the first j gradients, in
// contiguous buckets. The last bucket sends gradients i + 1 ... j; it starts at
// max(f(i), r(j)), because the link runs one collective at a time in order, and
// its end does not decrease with f(i). So
//
//   f(j) = min over i < j of max(f(i), r(j)) + cost(S(j) - S(i)),
//
// with S(j) the bytes of the first j gradients. f does not decrease: a plan for
// j + 1 gradients without its last one is a plan for j that ends no later,
// since the cost does not decrease. On one linear piece a + b * bytes of the
// cost, the i with sizes in the piece are a range whose ends increase with j.
//   - Of those with f(i) <= r(j), the largest i is best.
//   - Of the others, the least f(i) - b * S(i): the minimum over a range whose
//     ends increase, kept in a queue of increasing values.
// Each i enters and leaves each queue once: O(n * pieces).
class ExactPlan {
 public:
  ExactPlan(const Gradients& kind, const CollectiveCost& cost)
      : gradients_(kind), end_s_(kind.size() + 1, 0) {
    for (const CostPiece& piece : cost.pieces()) {
      if (!ranges_.empty()) ranges_.back().to_bytes = piece.from_bytes;
      ranges_.push_back({.piece = piece});
    }
  }

  // f of all gradients. REQUIRES: run().
  double end_s() const { return end_s_.back(); }

  // Returns the ends of the buckets.
  std::vector<size_t> run() {
    std::vector<size_t> begins(gradients_.size() + 1, 0);
    for (size_t j = 1; j <= gradients_.size(); ++j) begins[j] = add(j);
    std::vector<size_t> ends;
    for (size_t end = gradients_.size(); end > 0; end = begins[end]) {
      ends.push_back(end);
    }
    std::ranges::reverse(ends);
    return ends;
  }

 private:
  // The i for which the last bucket's size lies in a piece of the cost.
  struct Range {
    CostPiece piece;
    int64_t to_bytes = std::numeric_limits<int64_t>::max();
    size_t begin = 0;
    size_t end = 0;
    std::deque<size_t> queue = {};  // f(i) - b * S(i) increases
  };

  double bytes_before(size_t i) const {
    return static_cast<double>(gradients_.bytes_before[i]);
  }

  // Sets f(j). Returns the best i.
  size_t add(size_t j) {
    const double ready_s = gradients_.ready_s[j - 1];
    const int64_t bytes = gradients_.bytes_before[j];
    while (num_early_ < j && end_s_[num_early_] <= ready_s) ++num_early_;
    size_t best = 0;
    double best_s = std::numeric_limits<double>::infinity();
    for (Range& range : ranges_) {
      const auto value = [&](size_t i) {
        return end_s_[i] - range.piece.s_per_byte * bytes_before(i);
      };
      const auto consider = [&](size_t i, double start_s) {
        const double end_s =
            start_s + range.piece.latency_s +
            range.piece.s_per_byte * (bytes_before(j) - bytes_before(i));
        if (end_s < best_s) {
          best_s = end_s;
          best = i;
        }
      };
      while (range.end < j && bytes - gradients_.bytes_before[range.end] >=
                                  range.piece.from_bytes) {
        while (!range.queue.empty() &&
               value(range.queue.back()) >= value(range.end)) {
          range.queue.pop_back();
        }
        range.queue.push_back(range.end++);
      }
      while (range.begin < range.end &&
             bytes - gradients_.bytes_before[range.begin] >= range.to_bytes) {
        ++range.begin;
      }
      const size_t early_end = std::min(range.end, num_early_);
      if (early_end > range.begin) consider(early_end - 1, ready_s);
      while (!range.queue.empty() &&
             range.queue.front() < std::max(range.begin, num_early_)) {
        range.queue.pop_front();
      }
      if (!range.queue.empty()) {
        consider(range.queue.front(), end_s_[range.queue.front()]);
      }
    }
    end_s_[j] = best_s;
    return best;
  }

  const Gradients& gradients_;
  std::vector<double> end_s_;  // f
  std::vector<Range> ranges_;
  size_t num_early_ = 0;  // the i with f(i) <= r(j)
};

// ---- Local search, for several kinds, collectives at once, or contention.

// Merges, splits and moves ends of buckets while the step ends earlier.
void improve(const std::vector<Gradients>& kinds, const Backward& backward,
             const CollectiveCost& cost, Cuts& cuts) {
  int64_t budget = 100'000;  // buckets that end_of() may visit
  double best_s = end_of(kinds, cuts, backward, cost);
  const auto keep_if_better = [&](size_t kind, std::vector<size_t> ends) {
    for (const auto& of_kind : cuts) {
      budget -= static_cast<int64_t>(of_kind.size());
    }
    if (budget < 0) return false;
    std::swap(cuts[kind], ends);
    const double end_s = end_of(kinds, cuts, backward, cost);
    if (end_s < best_s * (1 - 1e-9)) {
      best_s = end_s;
      return true;
    }
    std::swap(cuts[kind], ends);
    return false;
  };
  bool has_improved = true;
  while (has_improved && budget > 0) {
    has_improved = false;
    for (size_t k = 0; k < kinds.size(); ++k) {
      for (size_t b = 0; b < cuts[k].size() && budget > 0; ++b) {
        const size_t begin = b == 0 ? 0 : cuts[k][b - 1];
        const size_t end = cuts[k][b];
        if (end - begin > 1) {
          std::vector<size_t> ends = cuts[k];
          ends.insert(ends.begin() + b, begin + (end - begin) / 2);
          has_improved |= keep_if_better(k, std::move(ends));
        }
        if (b + 1 >= cuts[k].size() || cuts[k][b] != end) continue;
        std::vector<size_t> merged = cuts[k];
        merged.erase(merged.begin() + b);
        if (keep_if_better(k, std::move(merged))) {
          has_improved = true;
          continue;
        }
        for (const int64_t step : {-8, -1, 1, 8}) {
          const auto moved = static_cast<int64_t>(cuts[k][b]) + step;
          if (moved <= static_cast<int64_t>(begin) ||
              moved >= static_cast<int64_t>(cuts[k][b + 1])) {
            continue;
          }
          std::vector<size_t> ends = cuts[k];
          ends[b] = static_cast<size_t>(moved);
          has_improved |= keep_if_better(k, std::move(ends));
        }
      }
    }
  }
}

// The buckets of a plan whose buckets are contiguous in each kind.
Cuts cuts_of(const std::vector<Gradients>& kinds, const BucketPlan& plan,
             const Backward& backward) {
  Cuts cuts(kinds.size());
  for (size_t k = 0; k < kinds.size(); ++k) {
    const auto bucket_of = [&](size_t i) {
      return plan.locate(backward.order[kinds[k].positions[i]]).bucket;
    };
    for (size_t i = 1; i < kinds[k].size(); ++i) {
      if (bucket_of(i) != bucket_of(i - 1)) cuts[k].push_back(i);
    }
    cuts[k].push_back(kinds[k].size());
  }
  return cuts;
}

BucketPlan plan_of(const std::vector<Gradients>& kinds, const Cuts& cuts,
                   const Backward& backward) {
  std::vector<std::vector<size_t>> buckets;
  for (const Bucket& bucket : buckets_of(kinds, cuts)) {
    std::vector<size_t>& members = buckets.emplace_back();
    const Gradients& kind = kinds[bucket.kind];
    for (size_t i = bucket.begin; i < bucket.end; ++i) {
      members.push_back(backward.order[kind.positions[i]]);
    }
  }
  return *BucketPlan::create(std::move(buckets), backward.parameters.size());
}

Cuts best_of_several(const std::vector<Gradients>& kinds,
                     const Backward& backward, const CollectiveCost& cost) {
  std::vector<Cuts> candidates;
  const auto add_plan = [&](std::span<const int64_t> caps_bytes) {
    const auto plan =
        plan_by_size(backward.parameters, backward.order, caps_bytes);
    candidates.push_back(cuts_of(kinds, *plan, backward));
  };
  add_plan(kDefaultBucketCapsBytes);
  for (int64_t cap_bytes = 1 << 18; cap_bytes <= int64_t{1} << 30;
       cap_bytes *= 4) {
    add_plan({&cap_bytes, 1});
  }
  // Simultaneous collectives hide part of the latency.
  for (const double share : std::set{1.0, 1.0 / cost.concurrency(), 0.0}) {
    std::vector<CostPiece> pieces = cost.pieces();
    const double hidden = (1 - share) * pieces.front().latency_s;
    for (CostPiece& piece : pieces) piece.latency_s -= hidden;
    const auto reduced = CollectiveCost::create(std::move(pieces));
    if (!reduced.ok()) continue;
    Cuts& cuts = candidates.emplace_back();
    for (const Gradients& kind : kinds) {
      cuts.push_back(ExactPlan(kind, *reduced).run());
    }
  }
  for (Cuts& cuts : candidates) improve(kinds, backward, cost, cuts);
  return *std::ranges::min_element(candidates, {}, [&](const Cuts& cuts) {
    return end_of(kinds, cuts, backward, cost);
  });
}

}  // namespace

absl::Status check_backward(const Backward& backward) {
  const size_t n = backward.parameters.size();
  if (n == 0) return bad_input("expected at least 1 parameter, found none");
  if (backward.order.size() != n || backward.ready_s.size() != n) {
    return bad_input("expected an order and ready times of ", n,
                     " parameters, found ", backward.order.size(), " and ",
                     backward.ready_s.size());
  }
  std::vector<char> is_listed(n, 0);
  double last_s = 0;
  for (size_t position = 0; position < n; ++position) {
    const size_t parameter = backward.order[position];
    if (parameter >= n || std::exchange(is_listed[parameter], 1) != 0) {
      return bad_input("expected each of ", n,
                       " parameters once in the order, found ", parameter,
                       parameter >= n ? "" : " twice");
    }
    if (backward.parameters[parameter].size_bytes < 0) {
      return bad_input("expected sizes >= 0, found ",
                       backward.parameters[parameter].size_bytes,
                       " bytes of parameter ", parameter);
    }
    const double ready_s = backward.ready_s[position];
    if (!std::isfinite(ready_s) || ready_s < last_s) {
      return bad_input(
          "expected finite ready times that don't decrease, found ", ready_s,
          " s after ", last_s, " s for parameter ", parameter);
    }
    last_s = ready_s;
  }
  if (!std::isfinite(backward.end_s) || backward.end_s < last_s) {
    return bad_input("expected backward to end after its last gradient at ",
                     last_s, " s, found ", backward.end_s, " s");
  }
  const auto& [slowdown, stretch] = backward.contention;
  if (!(slowdown >= 0 && slowdown < 1) || !(stretch >= 1) ||
      !std::isfinite(stretch)) {
    return bad_input("expected a slowdown in [0, 1) and a stretch >= 1, found ",
                     slowdown, " and ", stretch);
  }
  return absl::OkStatus();
}

double StepPrediction::end_s() const {
  return buckets.empty() ? backward_s
                         : std::max(backward_s, buckets.back().complete_s);
}

absl::StatusOr<StepPrediction> predict(const BucketPlan& plan,
                                       const Backward& backward,
                                       const CollectiveCost& cost) {
  if (absl::Status status = check_backward(backward); !status.ok()) {
    return status;
  }
  if (plan.num_parameters() != backward.parameters.size()) {
    return bad_input("expected a plan of ", backward.parameters.size(),
                     " parameters, found one of ", plan.num_parameters());
  }
  std::vector<double> ready_s(plan.num_buckets(), 0);
  std::vector<int64_t> bytes(plan.num_buckets(), 0);
  for (size_t position = 0; position < backward.order.size(); ++position) {
    const size_t parameter = backward.order[position];
    const size_t bucket = plan.locate(parameter).bucket;
    ready_s[bucket] = backward.ready_s[position];
    bytes[bucket] += backward.parameters[parameter].size_bytes;
  }
  StepPrediction prediction;
  Step step(backward, cost);
  for (size_t b = 0; b < plan.num_buckets(); ++b) {
    prediction.buckets.push_back(step.run(ready_s[b], bytes[b]));
  }
  prediction.backward_s = step.backward_end_s();
  return prediction;
}

// With a linear cost a + b * bytes, no plan is faster than contiguous buckets:
// if B(1) ... B(k) are launched in this order and j(i) is the last gradient of
// the first i buckets, then the buckets j(i - 1) + 1 ... j(i) are ready as
// early, and from each i on they have as few bytes and launches. A cost above a
// line ends no earlier than the line; nor do kinds that share no bucket, nor
// contention.
double earliest_end_s(const Backward& backward, const CollectiveCost& cost) {
  Gradients gradients;
  for (size_t position = 0; position < backward.order.size(); ++position) {
    gradients.add(backward, position);
  }
  double end_s = backward.end_s;
  for (const CostPiece& line : cost.lines_below()) {
    const auto linear = CollectiveCost::linear(line.latency_s, line.s_per_byte);
    ExactPlan plan(gradients, *linear);
    plan.run();
    end_s = std::max(end_s, plan.end_s() + cost.overlapped_s());
  }
  return end_s;
}

absl::StatusOr<BucketPlan> plan_for_cost(const Backward& backward,
                                         const CollectiveCost& cost,
                                         double slack) {
  if (absl::Status status = check_backward(backward); !status.ok()) {
    return status;
  }
  if (!(slack >= 0)) return bad_input("expected a slack >= 0, found ", slack);
  const std::vector<Gradients> kinds = kinds_of(backward);
  const bool is_exact = kinds.size() == 1 && cost.concurrency() == 1 &&
                        backward.contention == Contention{};
  const auto best_cuts = [&](const CollectiveCost& with_cost) {
    return is_exact ? Cuts{ExactPlan(kinds[0], with_cost).run()}
                    : best_of_several(kinds, backward, with_cost);
  };
  const Cuts cuts = best_cuts(cost);
  if (slack == 0) return plan_of(kinds, cuts, backward);
  // Each bucket costs `price_s` more in a second search. These cuts end at most
  // their number times the price later there, and an exact plan no later than
  // that: by at most the slack. A searched plan may miss it.
  size_t num_buckets = 0;
  for (const std::vector<size_t>& ends : cuts) num_buckets += ends.size();
  const double price_s = slack * end_of(kinds, cuts, backward, cost) /
                         static_cast<double>(num_buckets);
  std::vector<CostPiece> pieces = cost.pieces();
  for (CostPiece& piece : pieces) piece.latency_s += price_s;
  const auto priced = CollectiveCost::create(pieces, cost.concurrency());
  if (!priced.ok()) return plan_of(kinds, cuts, backward);
  const Cuts fewer = best_cuts(*priced);
  const bool is_close = end_of(kinds, fewer, backward, cost) <=
                        (1 + slack) * end_of(kinds, cuts, backward, cost);
  return plan_of(kinds, is_close ? fewer : cuts, backward);
}

absl::StatusOr<BucketPlan> plan_by_mg_wfbp(const Backward& backward,
                                           const CollectiveCost& cost) {
  if (absl::Status status = check_backward(backward); !status.ok()) {
    return status;
  }
  const std::vector<Gradients> kinds = kinds_of(backward);
  Cuts cuts;
  for (const Gradients& kind : kinds) {
    std::vector<size_t>& ends = cuts.emplace_back();
    double free_s = 0;
    size_t begin = 0;
    for (size_t i = 0; i < kind.size(); ++i) {
      const int64_t bytes = kind.bytes_before[i + 1] - kind.bytes_before[begin];
      const double start_s = std::max(free_s, kind.ready_s[i]);
      const double end_s = start_s + cost.seconds(bytes);
      if (i + 1 < kind.size()) {
        const double next_s = kind.ready_s[i + 1];
        if (next_s < end_s && next_s - start_s < cost.seconds(0)) continue;
      }
      ends.push_back(i + 1);
      begin = i + 1;
      free_s = end_s;
    }
  }
  return plan_of(kinds, cuts, backward);
}

absl::StatusOr<BucketPlan> plan_each(const Backward& backward) {
  if (absl::Status status = check_backward(backward); !status.ok()) {
    return status;
  }
  std::vector<std::vector<size_t>> buckets;
  for (const size_t parameter : backward.order) buckets.push_back({parameter});
  return BucketPlan::create(std::move(buckets), backward.parameters.size());
}

absl::StatusOr<BucketPlan> plan_one(const Backward& backward) {
  if (absl::Status status = check_backward(backward); !status.ok()) {
    return status;
  }
  const int64_t no_cap = std::numeric_limits<int64_t>::max();
  return plan_by_size(backward.parameters, backward.order, {&no_cap, 1});
}

std::vector<char> units_to_keep(std::span<const double> unit_bytes,
                                std::span<const double> gather_s,
                                double budget) {
  std::vector<size_t> order;
  for (size_t unit = unit_bytes.size(); unit-- > 0;) {
    if (unit_bytes[unit] > 0 && gather_s[unit] > 0) order.push_back(unit);
  }
  std::ranges::stable_sort(order, [&](size_t a, size_t b) {
    return gather_s[a] * unit_bytes[b] > gather_s[b] * unit_bytes[a];
  });
  std::vector<char> kept(unit_bytes.size(), 0);
  for (const size_t unit : order) {
    if (unit_bytes[unit] > budget) continue;
    kept[unit] = 1;
    budget -= unit_bytes[unit];
  }
  return kept;
}

}  // namespace brigade
