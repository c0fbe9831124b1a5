// A backward, also one that brings no gradients, and steps without data.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "absl/strings/str_cat.h"
#include "brigade/fsdp/sharded_root.h"
#include "brigade/hooks/backward_end.h"
#include "brigade/hooks/output_watch.h"

namespace brigade {

// Gradients of units that this backward has left out, and that it can't bring
// any more, are not waited for: peers wait for their sums.
void ShardedRoot::give_up_left_out_by(size_t unit) {
  if (!policy_->is_reducing()) return;
  std::vector<size_t> given_up = gathers_->schedule().left_out_by(unit);
  std::erase_if(given_up, [&](size_t other) { return may_be_used(other); });
  if (!given_up.empty()) {
    gathers_->launch_through(unit);
    for (const size_t left_out : given_up) give_up_gradients(left_out);
  }
  if (!policy_->is_out_of_turn(unit)) return;
  for (const size_t other : policy_->units_ahead_of(unit)) {  // whole ones, too
    if (!may_be_used(other)) give_up_gradients(other);
  }
}

// Else sums behind those would wait for the end of backward. A graph may be of
// a unit's parameters and hold no call of it: of its forward's first half, or
// of what is whole behind forward.
void ShardedRoot::give_up_unreached() {
  const std::vector<char>& called = called_before_[/*with gradients*/ 1];
  if (!policy_->is_reducing() || called.empty()) return;
  for (const size_t unit : policy_->unreached()) {
    if (called[unit] == 0 && !gathers_->is_claimed(unit) &&
        !may_be_used(unit)) {
      give_up_gradients(unit);
    }
  }
}

// In the rest of this backward. What is always whole may be used without a
// call.
bool ShardedRoot::may_be_used(size_t unit) const {
  return num_open_[unit] > 0 || is_held_[unit] != 0 ||
         !units_[unit].settings.reshards_after_backward ||
         live_calls_.may_bring_gradients(unit);
}

void ShardedRoot::give_up_gradients(size_t unit) {
  const std::vector<size_t> variables = policy_->awaited_of(unit);
  if (!variables.empty()) policy_->note_given_up(unit);
  for (const size_t variable : variables) {
    engine_->gradient_ready({.replica = 0, .parameter = variable},
                            /*is_defined=*/false);
  }
}

// Peers that are elsewhere would wait for ever, as this rank would.
void ShardedRoot::ask_out_of_turn(size_t unit) {
  gathers_->launch_expected();
  ask({.words = absl::StrCat(
           "needed unit '", units_[unit].name,
           "' in backward ahead of sums that others may wait for (use one "
           "order on all ranks, or set max_reducing to the number of units)"),
       .words_of_all = "needed a unit ahead of sums",
       .said = {unit, policy_->num_sums_launched()}});
  policy_->note_ranks_are_alike();
}

void ShardedRoot::open(const std::shared_ptr<Call>& call) {
  if (pass_ != Pass::kBackward) {
    begin_backward();
    give_up_unreached();
  }
  const size_t unit = call->unit;
  TORCH_CHECK(call->version == version_of(units_[unit]),
              "fully_shard: the parameters of unit '", units_[unit].name,
              "' were changed between its forward and its backward.\nRun "
              "backward before the optimizer's step.");
  if (call->open_in != backward_) {
    call->open_in = backward_;
    ++num_open_[unit];
  }
  if (!units_[unit].settings.gathers_in_backward) return;
  // Not where a unit is called again for its backward: more of them may be.
  give_up_left_out_by(unit);
  need(unit);
}

void ShardedRoot::close(Call& call) {
  if (call.open_in != backward_ || pass_ != Pass::kBackward) return;
  call.open_in = 0;
  gathers_->record_use(call.unit);
  --num_open_[call.unit];
  live_calls_.left(call.unit);
  // What a call has not used of its unit, as experts without a token.
  if (policy_->is_reducing() && live_calls_.are_all_left(call.unit) &&
      units_[call.unit].settings.reshards_after_backward &&
      is_held_[call.unit] == 0) {
    give_up_gradients(call.unit);
  }
  if (units_[call.unit].settings.spans_passes) return;
  // Nodes on other streams have been launched, and gradients, of which
  // some come behind other calls alone, do not tell of all that have read.
  if (!streams().device().is_cpu()) {
    gathers_->record_uses(call.unit,
                          backward_streams_.of(call.ends, call.inside));
  }
  release_behind_backward(call.unit);
}

void ShardedRoot::release_behind_backward(size_t unit) {
  if (units_[unit].settings.reshards_after_backward) {
    release_if_unused(unit);
  } else if (num_running_[unit] == 0 && num_open_[unit] == 0) {
    is_kept_[unit] = 0;
  }
}

void ShardedRoot::begin_backward() {
  begin_backward_through(units_that_graphs_reach());
  computes_backward_ = true;
}

std::vector<char> ShardedRoot::units_that_graphs_reach() const {
  std::vector<char> reached;
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    reached.push_back(live_calls_.may_be_reached(unit) ? 1 : 0);
  }
  return reached;
}

void ShardedRoot::begin_backward_through(std::vector<char> units) {
  TORCH_CHECK(pass_ != Pass::kApart,
              "fully_shard: a backward inside of unshard().\nLeave it first.");
  computes_backward_ = false;
  policy_->reached().note(std::move(units));
  claim_kept();
  ++backward_;
  const bool is_of_step = accumulates_all_gradients();
  if (is_of_step) pool_.set_recording(true);
  backward_reduces_ = is_of_step && is_reduced();
  if (backward_reduces_) {
    try {
      engine_->begin_in_backward();
    } catch (...) {  // perhaps of an iteration before, which was told late
      drop_pass();
      throw;
    }
    note_reduced_backward();
    pass_ = Pass::kBackward;
    return;
  }
  std::vector<size_t> told = policy_->agreed_in_backward();
  const std::vector<int> in_slices = gathers_->in_slices();
  told.insert(told.end(), in_slices.begin(), in_slices.end());
  const ToldAlike alike =
      ask({.words = "began a backward that is not reduced", .said = told});
  policy_->on_begun_together(alike.orders);
  try {
    gathers_->begin(policy_->expected_in_backward(), GatheredIn::kBackward);
  } catch (...) {
    drop_pass();
    throw;
  }
  pass_ = Pass::kBackward;
  peers_know_ = false;
  watch_backward_end(
      alive_, [this] { on_backward_over(/*ended_well=*/true); },
      [this] {
        end_backward(/*ended_well=*/false);
        if (!peers_know_) {
          engine_->fail(std::make_exception_ptr(
              std::runtime_error("an exception ended backward")));
        }
        leave_backward();
      });
}

// As settings are now: some unit is.
bool ShardedRoot::is_reduced() const {
  return synchronizes_ && std::ranges::any_of(units_, [](const Unit& unit) {
           return unit.settings.synchronizes;
         });
}

void ShardedRoot::on_backward_over(bool ended_well) {
  if (pass_ == Pass::kApart) return;
  end_backward(ended_well);
  leave_backward();
}

// All ranks know of an error that is on its way to the caller. A device's
// thread would end the iteration behind it, while the caller goes on.
void ShardedRoot::drop_pass() {
  const bool is_in_backward = running_backward_id() >= 0;
  if (is_in_backward) {
    try {
      engine_->end_iteration();
    } catch (const std::exception&) {
      // The first error is told.
    }
  }
  if (pass_ == Pass::kBackward && is_in_backward) {
    end_backward(/*ended_well=*/false);  // its graph's end leaves it
  } else {
    on_backward_over(/*ended_well=*/false);
  }
}

// The caller of a backward that threw may go on before.
void ShardedRoot::leave_backward() {
  const std::lock_guard<std::mutex> lock(pass_mutex_);
  pass_ = Pass::kNone;
  backward_is_over_.notify_all();
}

void ShardedRoot::await_backward() {
  if (running_backward_id() >= 0) return;
  std::unique_lock<std::mutex> lock(pass_mutex_);
  backward_is_over_.wait_for(lock, options_.failure_patience,
                             [this] { return pass_ != Pass::kBackward; });
}

// Nothing is waited for here: peers may not have launched what is in flight.
void ShardedRoot::end_backward(bool ended_well) {
  try {
    gathers_->launch_rest();
  } catch (const std::exception&) {
    // Connections are lost: there is nobody to gather for.
  }
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    num_open_[unit] = 0;
    if (!gathers_->is_claimed(unit)) continue;
    if (ended_well) {
      release_behind_backward(unit);
    } else {
      release_if_unused(unit);
    }
  }
  if (!ended_well) {
    gathers_->drop_slices();
    gathers_->recorder().drop();
    drop_step();
  }
  live_calls_.backward_over();
  if (ended_well && computes_backward_) {
    live_calls_.note_needed(gathers_->schedule().record());
  }
  policy_->note_backward_over();
  is_behind_backward_ = ended_well;
  if (!backward_reduces_) return;
  pool_.give_up_unused();
  pool_.set_recording(false);  // what is between steps is part of none
  is_step_over_ = ended_well;
}

void ShardedRoot::reduce() {
  await_backward();
  TORCH_CHECK(pass_ == Pass::kNone,
              "fully_shard: gradients are to be reduced inside of a forward or "
              "backward, or of unshard().\nDo so between them.");
  TORCH_CHECK(is_reduced(),
              "fully_shard: gradients are to be reduced, but synchronisation "
              "is off.\nSwitch it on first.");
  run_empty_backward();
}

void ShardedRoot::run_empty_backward() {
  const at::AutoGradMode with_graph(true);
  const at::Tensor leaf = at::zeros({}).set_requires_grad(true);
  const at::Tensor output = leaf.mul(1);
  watch_outputs({&output, 1}, alive_, [this] {
    if (pass_ != Pass::kBackward) {  // as peers' that compute, most likely
      begin_backward_through(
          policy_->reached().last_alike(expected_to_be_reached()));
    }
    bring_no_gradients();
  });
  output.backward();
}

// What a backward does beside computing: units are whole one after the other,
// and each is reduced in its turn, so that this takes the planned memory too.
void ShardedRoot::bring_no_gradients() {
  const std::vector<size_t> gathered = policy_->expected_in_backward();
  const auto leave = [&](size_t unit) {  // not what is gathered ahead
    if (gathers_->is_claimed(unit)) release_behind_backward(unit);
  };
  // Nothing is computed with what forward has left whole.
  for (size_t unit = 0; unit < units_.size(); ++unit) leave(unit);
  auto next = gathered.begin();
  const auto gather_before = [&](auto end) {
    for (; next != end; ++next) {
      need(*next);
      leave(*next);
    }
  };
  for (const auto& [unit, variables] : policy_->awaited()) {
    const auto place = std::find(next, gathered.end(), unit);
    if (place != gathered.end()) {
      gather_before(place);
      need(*next++);
    }
    if (is_reduced()) {
      for (const size_t variable : variables) {
        engine_->gradient_ready({.replica = 0, .parameter = variable},
                                /*is_defined=*/false);
      }
    }
    leave(unit);
  }
  gather_before(gathered.end());
}

int64_t ShardedRoot::num_ranks_with(bool has_data) {
  ask({.words = "counts its peers"});
  const at::Tensor count = at::full({1}, has_data ? 1 : 0, at::kLong);
  transports_.root().all_reduce(count)->waitAndThrow();
  return count.item<int64_t>();
}

// Units are whole one after the other, as on the ranks that compute.
void ShardedRoot::step_without_data() {
  const at::AutoGradMode with_graph(true);
  forward([&] {
    for (const size_t unit : policy_->expected_in_forward()) {
      need(unit);
      if (units_[unit].settings.reshards_after_forward) {
        release_behind_forward(unit);
      }
    }
    return 0;
  });
  run_empty_backward();
}

}  // namespace brigade
