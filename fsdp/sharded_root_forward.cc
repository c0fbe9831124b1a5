// A forward, and the calls of units in it.

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <numeric>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "brigade/fsdp/sharded_root.h"
#include "brigade/hooks/backward_end.h"
#include "brigade/hooks/input_gate.h"
#include "brigade/hooks/output_watch.h"
#include "brigade/hooks/saved_tensor_scope.h"

namespace brigade {

void ShardedRoot::begin_forward() {
  await_backward();
  if (pass_ == Pass::kBackward) return;  // what it needs is asked for
  TORCH_CHECK(pass_ != Pass::kForward,
              "fully_shard: a forward began inside of another one of the same "
              "root.\nLet the outer one end first.");
  peers_know_ = false;
  keeps_units_ = at::GradMode::is_enabled();
  check_shards();
  check_settings();
  follow_shards();
  claim_kept();
  release_outdated();
  note_step_begins();
  const std::vector<size_t> expected = policy_->expected_in_forward();
  ask({.words = "began a forward", .said = expected});
  gathers_->shards_are_written();
  gathers_->release_unneeded();
  plan_memory();
  if (keeps_units_) pool_.set_recording(true);
  if (keeps_units_) call_depths_.begin_forward();
  called_.assign(units_.size(), 0);
  forward_is_over_ = false;
  gathers_->begin(expected, GatheredIn::kForward);
  if (pass_ == Pass::kNone) pass_ = Pass::kForward;
}

void ShardedRoot::end_forward() {
  if (pass_ == Pass::kBackward) return;
  forward_is_over_ = true;
  pass_over_before(gathers_->schedule().num_expected());
  gathers_->launch_rest();
  if (keeps_units_) {
    const std::vector<size_t>& record = gathers_->schedule().record();
    policy_->note_forward(record,
                          backward_order_of(call_depths_.calls(record)));
    // What is whole behind a forward does not depend on this rank's branches.
    for (size_t unit = 0; unit < units_.size(); ++unit) {
      if (units_[unit].settings.reshards_after_forward ||
          !gathers_->schedule().is_there(unit)) {
        continue;
      }
      need(unit);
      is_kept_[unit] = 1;
    }
  }
  // Nor does what is released.
  for (size_t unit = 0; unit < units_.size(); ++unit) leave_forward(unit);
  gathers_->recorder().forward_ends();
  if (pass_ != Pass::kForward) return;
  pass_ = Pass::kNone;
  called_before_[keeps_units_ ? 1 : 0] = std::exchange(called_, {});
}

// Gathers before `place` are launched, which peers may need. Of what they make
// whole, and this forward passes over, no more stays than is gathered ahead of
// a need; but for what it may come back to.
void ShardedRoot::pass_over_before(size_t place) {
  const GatherSchedule& schedule = gathers_->schedule();
  if (place <= schedule.num_needed()) return;
  for (;;) {
    std::vector<size_t> passed = schedule.unclaimed_before(place);
    std::erase_if(passed, [&](size_t unit) {
      const bool is_kept =
          keeps_units_ && !units_[unit].settings.reshards_after_forward;
      return is_kept || may_be_called(unit);
    });
    for (size_t i = 0; i + schedule.depth() < passed.size(); ++i) {
      leave_forward(passed[i]);
    }
    if (schedule.num_launched() >= place) return;
    gathers_->launch_next();
  }
}

// In the rest of this forward: as the last of its kind has, on this rank.
bool ShardedRoot::may_be_called(size_t unit) const {
  const std::vector<char>& before = called_before_[keeps_units_ ? 1 : 0];
  return pass_ == Pass::kForward && !forward_is_over_ &&
         (before.empty() || before[unit] != 0);
}

void ShardedRoot::pass_over_for(size_t unit) {
  if (pass_ != Pass::kForward || forward_is_over_) return;
  called_[unit] = 1;
  if (gathers_->is_claimed(unit)) return;
  pass_over_before(gathers_->schedule().awaited_by(unit));
}

void ShardedRoot::leave_forward(size_t unit) {
  if (gathers_->schedule().is_there(unit) && is_kept_[unit] == 0) {
    release_behind_forward(unit);
  }
}

// Peers are told by the error that it leads to here.
void ShardedRoot::refuse_to_begin(const std::string& text) {
  engine_->fail(std::make_exception_ptr(std::runtime_error(text)));
  peers_know_ = true;
  TORCH_CHECK(false, text);
}

// There are groups of the neighbours that were named when this was made.
void ShardedRoot::check_settings() {
  for (const Unit& unit : units_) {
    const std::optional<int>& found = unit.settings.reshards_to;
    const std::vector<int>& known = transports_.neighbours_of(unit);
    if (!found || std::ranges::find(known, *found) != known.end()) continue;
    refuse_to_begin(absl::StrCat(
        "fully_shard: unit '", unit.name, "' is to be resharded to ", *found,
        " ranks, found groups of [", absl::StrJoin(known, ", "),
        "] only: what units were to be when the root was made.\nGive ", *found,
        " to one of them before the first forward."));
  }
}

// What a unit was made of.
void ShardedRoot::check_shards() {
  for (const Unit& unit : units_) {
    for (const auto& segment : unit.segments) {
      for (size_t i = 0; i < segment->shards().size(); ++i) {
        const at::Tensor& shard = segment->shards()[i];
        if (shard.storage().is_alias_of(segment->shard().storage())) continue;
        refuse_to_begin(absl::StrCat(
            "fully_shard: the shard of parameter '",
            segment->parameters()[i].name, "' of unit '", unit.name,
            "' was given other memory since it was made.\nWrite into it in "
            "place."));
      }
    }
  }
}

// Frozen or thawed by whoever has the shards.
void ShardedRoot::follow_shards() {
  bool is_changed = false;
  for (const Unit& unit : units_) {
    for (const auto& segment : unit.segments) {
      is_changed |= segment->follow_shards();
    }
  }
  if (!is_changed) return;
  policy_->note_trained_changed();
  policy_->reached().forget();
}

// What stays whole behind a backward does not depend on this rank's branches.
void ShardedRoot::claim_kept() {
  if (!std::exchange(is_behind_backward_, false)) return;
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    if (units_[unit].settings.reshards_after_backward ||
        !gathers_->schedule().is_there(unit)) {
      continue;
    }
    need(unit);
  }
}

void ShardedRoot::forward_failed(const std::exception_ptr& error) {
  if (pass_ == Pass::kBackward) return;  // which fails, and tells of it
  try {
    gathers_->launch_rest();
  } catch (const std::exception&) {
    // Connections are lost: there is nobody to gather for.
  }
  std::ranges::fill(num_running_, 0);
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    if (gathers_->is_claimed(unit)) release_if_unused(unit);
  }
  gathers_->drop_slices();
  gathers_->recorder().drop();
  drop_step();
  if (pass_ == Pass::kForward) pass_ = Pass::kNone;
  if (!peers_know_) engine_->fail(error);
}

// What is whole and was gathered before its shards changed.
void ShardedRoot::release_outdated() {
  for (size_t unit = 0; unit < units_.size(); ++unit) release_if_outdated(unit);
}

void ShardedRoot::release_if_outdated(size_t unit) {
  if (!options_.trusts_versions && is_held_[unit] == 0) {
    for (const auto& segment : units_[unit].segments) {
      segment->note_possible_step();
    }
  }
  if (gathers_->is_claimed(unit) && !gathers_->is_current(unit)) {
    release_if_unused(unit);
  }
}

const std::vector<size_t>& ShardedRoot::ahead_of(size_t unit) const {
  const UnitSettings& settings = units_[unit].settings;
  return pass_ == Pass::kBackward ? settings.backward_prefetch
                                  : settings.forward_prefetch;
}

void ShardedRoot::need(size_t unit) {
  if (policy_->is_out_of_turn(unit)) ask_out_of_turn(unit);
  pass_over_for(unit);
  gathers_->need(unit, ahead_of(unit), [this, unit] { ask_for(unit); });
}

std::shared_ptr<ShardedRoot::Call> ShardedRoot::begin_call(
    size_t unit, std::span<at::Tensor> inputs) {
  if (running_backward_id() < 0 && num_running_[unit] == 0 &&
      gathers_->is_claimed(unit) && !gathers_->is_current(unit)) {
    gathers_->release(unit);
  }
  need(unit);
  if (pass_ == Pass::kForward && keeps_units_) {
    call_depths_.note(unit, std::accumulate(num_running_.begin(),
                                            num_running_.end(), size_t{0}));
  }
  ++num_running_[unit];
  // In a checkpoint that will be computed again, or is: one that holds no call.
  const bool may_be_checkpointed =
      !at::GradMode::is_enabled() &&
      (pass_ == Pass::kNone || (pass_ == Pass::kForward && keeps_units_));
  if (may_be_checkpointed ||
      (running_backward_id() >= 0 && !live_calls_.may_bring_gradients(unit))) {
    live_calls_.may_be_unseen(unit);
    live_calls_.may_be_recomputed(unit);
  } else if (pass_ == Pass::kForward && has_saved_tensor_hooks()) {
    live_calls_.may_be_recomputed(unit);
  }
  const auto call =
      std::make_shared<Call>(Call{.unit = unit,
                                  .version = version_of(units_[unit]),
                                  .first_node = at::sequence_number::peek(),
                                  .live = live_calls_.begin(unit)});
  call->is_seen = gate_inputs(inputs, alive_, [this, call] { close(*call); });
  call->inside = RecordedSince::now();
  return call;
}

void ShardedRoot::abort_call(const Call& call) {
  if (num_running_[call.unit] > 0) --num_running_[call.unit];
  if (running_backward_id() < 0 && is_kept_[call.unit] == 0) {
    release_behind_forward(call.unit);
  }
}

void ShardedRoot::end_call(const std::shared_ptr<Call>& call,
                           std::span<const at::Tensor> outputs) {
  const size_t unit = call->unit;
  if (pass_ != Pass::kApart) refuse_writes(units_[unit]);
  if (at::GradMode::is_enabled()) {
    call->is_seen |= watch_outputs(
        outputs, alive_, [this, call] { open(call); }, call->first_node);
    if (!call->is_seen) live_calls_.may_be_unseen(unit);
    if (!streams().device().is_cpu()) {
      call->ends = watched_nodes(outputs, call->first_node);
      // Not the gate of an input that is returned: it holds the call, and
      // would be held by it.
      std::erase_if(call->ends, [&](const WeakNodePtr& end) {
        return !call->inside.holds(*end.lock());
      });
    }
  }
  if (num_running_[unit] > 0) --num_running_[unit];
  if (running_backward_id() >= 0) return;  // computed again for its backward
  // Also without a backward on this rank: peers may have one.
  if (keeps_units_ && !units_[unit].settings.reshards_after_forward) {
    is_kept_[unit] = 1;
  }
  if (is_kept_[unit] == 0 && !units_[unit].settings.spans_passes) {
    release_behind_forward(unit);
  }
}

// Of whole parameters, which nobody would hear of: they are gathered anew.
void ShardedRoot::refuse_writes(const Unit& unit) {
  for (const auto& segment : unit.segments) {
    if (segment->is_whole_here()) continue;
    const std::optional<size_t> written = segment->written_parameter();
    TORCH_CHECK_NOT_IMPLEMENTED(
        !written, "fully_shard: parameter '",
        segment->parameters()[written.value_or(0)].name, "' of unit '",
        unit.name,
        "' was written to in forward, or since it was gathered, which would be "
        "lost.\nWrite to it between forwards and reshard it with its writes "
        "before the next, or leave it out of sharding (an Embedding's max_norm "
        "writes in forward).");
  }
}

void ShardedRoot::release_if_unused(size_t unit) {
  if (num_running_[unit] > 0 || num_open_[unit] > 0) return;
  if (pass_ == Pass::kApart) return;
  is_kept_[unit] = 0;
  is_held_[unit] = 0;
  gathers_->release(unit);
  if (const auto tell = std::exchange(on_released_[unit], {})) tell();
}

// In slices, which do not depend on this rank's branches, nor on whether it has
// a backward: a rank that leaves the unit out keeps its slice where forward
// ends.
void ShardedRoot::release_behind_forward(size_t unit) {
  if (num_running_[unit] > 0 || num_open_[unit] > 0) return;
  if (pass_ == Pass::kApart) return;
  const UnitSettings& settings = units_[unit].settings;
  if (keeps_units_ && settings.keeps_slices()) {
    gathers_->keep_slices(unit, *settings.reshards_to);
  }
  release_if_unused(unit);
}

}  // namespace brigade
