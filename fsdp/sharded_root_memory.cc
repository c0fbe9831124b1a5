// What units take, by plan and so far.

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "brigade/fsdp/schedule/memory_plan.h"
#include "brigade/fsdp/sharded_root.h"

namespace brigade {
std::vector<UnitCall> ShardedRoot::expected_calls() const {
  return call_depths_.calls(policy_->calling_order());
}

std::vector<char> ShardedRoot::expected_to_be_reached() const {
  std::vector<char> is_trained;
  for (const Unit& unit : units_) {
    is_trained.push_back(std::ranges::any_of(unit.segments,
                                             [](const auto& segment) {
                                               return segment->is_trained();
                                             })
                             ? 1
                             : 0);
  }
  return policy_->reached().expected(
      assumed_reached(expected_calls(), is_trained));
}

MemoryPlan ShardedRoot::make_plan() const {
  const std::vector<RecordedUse>& step = step_plans_.planned();
  absl::StatusOr<MemoryPlan> plan =
      step.empty() ? plan_of_calls() : MemoryPlan::create(step);
  TORCH_CHECK_VALUE(plan.ok(),
                    "fully_shard: ", std::string(plan.status().message()));
  return *std::move(plan);
}

absl::StatusOr<MemoryPlan> ShardedRoot::plan_of_calls() const {
  std::vector<PlannedUnit> units;
  units.reserve(units_.size());
  const std::vector<char> is_reached = expected_to_be_reached();
  for (size_t i = 0; i < units_.size(); ++i) {
    const Unit& unit = units_[i];
    PlannedUnit& planned = units.emplace_back();
    planned.settings = unit.settings;
    planned.is_reached = is_reached[i] != 0;
    planned.adds_up_gradients = adds_up_gradients(i);
    for (const auto& segment : unit.segments) {
      PlannedSegment& added = planned.segments.emplace_back();
      if (!segment->is_whole_here()) {
        added.whole_bytes = segment->whole_bytes();
      }
      if (unit.settings.keeps_slices()) {
        added.slice_bytes = segment->whole_bytes() / *unit.settings.reshards_to;
      }
      if (segment->is_trained()) {
        added.gradient_bytes = segment->gradient_bytes();
      }
    }
  }
  return MemoryPlan::create(units, expected_calls(), options_.prefetch_depth,
                            gradient_memory_.max_reducing());
}

// One that does so now, or has done before.
bool ShardedRoot::adds_up_gradients(size_t unit) const {
  const Unit& asked = units_[unit];
  return !synchronizes_ || !asked.settings.synchronizes ||
         units_that_add_up_.contains(unit) ||
         std::ranges::any_of(asked.segments, [](const auto& segment) {
           return segment->has_whole_gradients();
         });
}

void ShardedRoot::follow_last_step() {
  must_plan_ |= step_plans_.follow(pool_.end_step(), [this](const auto& step) {
    const absl::StatusOr<MemoryPlan> of_calls = plan_of_calls();
    return of_calls.ok() && of_calls->suffices_for(step);
  });
}

// One that has failed is no example.
void ShardedRoot::drop_step() {
  pool_.end_step();
  pool_.set_recording(false);
  is_step_over_ = false;
}

// Before buffers are lent, and again, where a step begins, if units are called
// in another order than planned, each once, or otherwise inside of each other,
// or reached by backward, or gradients are added up that were not before.
void ShardedRoot::plan_memory() {
  const bool step_begins = std::exchange(is_step_over_, false);
  if (step_begins) follow_last_step();
  std::set<size_t> adding_up;
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    if (adds_up_gradients(unit)) adding_up.insert(unit);
  }
  const bool adds_up_more = adding_up != units_that_add_up_;
  units_that_add_up_ = std::move(adding_up);
  const bool calls_differ =
      step_begins && (planned_calls_ != expected_calls() ||
                      planned_reached_ != expected_to_be_reached());
  if (adds_up_more || calls_differ) {
    step_plans_.calls_differ();
    must_plan_ = true;
  }
  if (planned_bytes_ && !(must_plan_ && step_begins)) return;
  must_plan_ = false;
  planned_calls_ = expected_calls();
  planned_reached_ = expected_to_be_reached();
  MemoryPlan plan = make_plan();
  planned_bytes_ = plan.total_bytes();
  pool_.plan(std::move(plan));
}

ShardingStatistics ShardedRoot::statistics() const {
  ShardingStatistics statistics = {
      .late_gathers = static_cast<int64_t>(gathers_->schedule().num_late()),
      .ahead_gathers = static_cast<int64_t>(gathers_->schedule().num_ahead()),
      .unneeded_gathers =
          static_cast<int64_t>(gathers_->schedule().num_unneeded()),
      .near_gathers = gathers_->num_near(),
      .allocations = pool_.num_allocations(),
      .unplanned = pool_.num_unplanned(),
      .whole_bytes = pool_.bytes(),
      .peak_whole_bytes = pool_.peak_bytes(),
      .planned_bytes =
          planned_bytes_ ? *planned_bytes_ : make_plan().total_bytes(),
      .sent_by_gathers = transports_.sent().by_gathers,
      .sent_by_sums = transports_.sent().by_sums};
  for (const Unit& unit : units_) {
    for (const auto& segment : unit.segments) {
      const int64_t element = segment->shard().element_size();
      statistics.shard_bytes += segment->layout().shard_numel() * element;
      statistics.padding_bytes += segment->layout().padding_numel() * element;
    }
  }
  return statistics;
}

namespace {

// ", buffer 0 in forward, buffer 0, 1 in backward, gradients in buffer 2"
std::string describe_buffers(const MemoryPlan& plan, const Segment& segment) {
  std::string text;
  const auto add = [&](const char* before, Purpose purpose,
                       const char* behind) {
    const std::span<const size_t> uses = plan.of(segment.use_for(purpose));
    const std::set<size_t> buffers(uses.begin(), uses.end());
    if (buffers.empty()) return;
    absl::StrAppend(&text, ", ", before, absl::StrJoin(buffers, ", "), behind);
  };
  add("buffer ", Purpose::kForward, " in forward");
  add("buffer ", Purpose::kSlice, " in between");
  add("buffer ", Purpose::kBackward, " in backward");
  add("buffer ", Purpose::kOther, " beside these");
  add("gradients in buffer ", Purpose::kGradients, "");
  return text;
}

}  // namespace

std::string ShardedRoot::explain() const {
  const auto names_of = [this](const std::vector<size_t>& units) {
    return absl::StrJoin(units, ", ", [this](std::string* out, size_t unit) {
      absl::StrAppend(out, "'", units_[unit].name, "'");
    });
  };
  const MemoryPlan plan = make_plan();
  const ShardingStatistics memory = statistics();
  std::vector<size_t> reached_in_backward = policy_->expected_in_backward();
  std::erase_if(reached_in_backward,
                [is_reached = expected_to_be_reached()](size_t unit) {
                  return is_reached[unit] == 0;
                });
  std::string text = absl::StrCat(
      units_.size(), units_.size() == 1 ? " unit" : " units", ", ",
      num_shards(), " shards, ", transports_.root().num_replicas(),
      " replicas, on ", pool_.device().str(),
      "; whole units and gradients take ", plan.total_bytes(),
      " bytes by plan, took at most ", memory.peak_whole_bytes, " so far\n");
  absl::StrAppend(&text, "  the next forward gathers [",
                  names_of(policy_->expected_in_forward()), "] in this order, ",
                  options_.prefetch_depth,
                  " ahead of their need; its backward needs [",
                  names_of(reached_in_backward), "] and reduces [",
                  names_of(policy_->reduced_units()), "]\n  buffers of [",
                  absl::StrJoin(plan.buffer_bytes(), ", "), "] bytes\n");
  for (const Unit& unit : units_) {
    for (const auto& segment : unit.segments) {
      absl::StrAppend(
          &text, "  '", unit.name, "': ", segment->parameters().size(),
          " parameters, ", segment->whole_bytes(), " bytes whole, ",
          segment->layout().shard_numel() * segment->shard().element_size(),
          " bytes here, ", segment->layout().padding_numel(),
          " elements of padding", segment->is_trained() ? "" : ", frozen",
          describe_buffers(plan, *segment),
          unit.settings.reshards_after_forward
              ? ""
              : ", whole from forward to backward",
          unit.settings.keeps_slices()
              ? absl::StrCat(", in slices on ", *unit.settings.reshards_to,
                             " ranks in between")
              : "",
          unit.mesh ? absl::StrCat(", over ", brigade::describe(*unit.mesh))
                    : "",
          "\n");
    }
  }
  return text;
}

}  // namespace brigade
