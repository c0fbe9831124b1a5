#include "brigade/fsdp/units/unit_policy.h"

#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "brigade/comm/errors/shortened_list.h"
#include "brigade/engine/running_iteration.h"
#include "brigade/fsdp/layout/digest.h"
#include "brigade/fsdp/units/post_accumulate_hooks.h"
#include "brigade/hooks/backward_end.h"

namespace brigade {
namespace {

// As it was seen, and then what was not needed: some rank may need it next
// time. REQUIRES: `all` has every number from 0 on.
std::vector<size_t> completed(std::vector<size_t> record,
                              const std::vector<size_t>& all) {
  std::vector<char> is_there(all.size());
  for (const size_t unit : record) is_there[unit] = 1;
  for (const size_t unit : all) {
    if (!std::exchange(is_there[unit], 1)) record.push_back(unit);
  }
  return record;
}

// A unit that so many forwards have left out is not gathered ahead of others;
// two that are used in turns are.
constexpr int kForgottenAfter = 2;

// As it was seen, and what was not needed, or was whole already, behind what it
// is behind of in `all`: a program that comes to it again comes to it there.
// `num_absent`: forwards, by unit.
std::vector<size_t> with_left_out(std::vector<size_t> record,
                                  const std::vector<size_t>& all,
                                  const std::vector<int>& num_absent) {
  size_t place = 0;  // behind the last of `all` that is there
  for (const size_t unit : all) {
    const auto found = std::ranges::find(record, unit);
    if (found != record.end()) {
      place = static_cast<size_t>(found - record.begin()) + 1;
    } else if (num_absent[unit] < kForgottenAfter) {
      record.insert(record.begin() + static_cast<std::ptrdiff_t>(place), unit);
      ++place;
    }
  }
  return record;
}

// All of `part` are in `order`, one behind the other.
bool is_in_order(const std::vector<size_t>& part,
                 const std::vector<size_t>& order) {
  auto next = part.begin();
  for (const size_t unit : order) {
    if (next != part.end() && *next == unit) ++next;
  }
  return next == part.end();
}

// Those whose gradients were committed.
void add_hooked(const Segment& segment, const std::vector<char>& is_used,
                std::vector<at::Tensor>& hooked) {
  for (size_t i = 0; i < is_used.size(); ++i) {
    const at::Tensor& shard = segment.shards()[i];
    if (is_used[i] && has_post_accumulate_hooks(shard)) hooked.push_back(shard);
  }
}

bool have_network_hooks(const std::vector<Unit>& units) {
  return std::ranges::all_of(units, [](const Unit& unit) {
    return !unit.comm_hook || unit.comm_hook->fails_by_network_only();
  });
}

}  // namespace

UnitPolicy::UnitPolicy(std::vector<Unit>& units, MeshTransports& transports,
                       UnitGathers& gathers, GradientMemory& memory,
                       Listener& listener, uint64_t fingerprint_of_units,
                       std::vector<size_t> backward_order)
    : units_(units),
      transport_(transports.root()),
      gathers_(gathers),
      memory_(memory),
      listener_(listener),
      fingerprint_of_units_(fingerprint_of_units),
      traits_({.fails_by_network_only = have_network_hooks(units)}),
      backward_order_(std::move(backward_order)),
      reached_(units.size()) {
  size_t num_reductions = 0;
  for (const Unit& unit : units_) {
    num_reductions += std::ranges::count_if(
        unit.segments,
        [](const auto& segment) { return segment->can_be_trained(); });
  }
  reductions_.reserve(num_reductions);  // they stay where they are
  reductions_of_.resize(units_.size());
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    for (const auto& segment : units_[unit].segments) {
      if (!segment->can_be_trained()) continue;
      const size_t index = reductions_.size();
      reductions_of_[unit].push_back(index);
      reductions_.emplace_back(index, units_[unit], *segment,
                               transports.of(units_[unit]), memory_);
      first_variable_.push_back(variables_.size());
      for (size_t i = 0; i < segment->parameters().size(); ++i) {
        numbers_[segment->parameters()[i].tensor.unsafeGetTensorImpl()] =
            variables_.size();
        variables_.push_back(
            {.reduction = index, .in_segment = i, .unit = unit});
      }
    }
  }
  is_used_.assign(variables_.size(), 0);
  num_absent_.assign(units_.size(), 0);
  if (!transport_.streams().device().is_cpu() && !variables_.empty()) {
    used_sum_ = std::make_unique<UsedSum>(is_used_, transport_);
  }
  forward_order_.resize(units_.size());
  std::iota(forward_order_.begin(), forward_order_.end(), size_t{0});
  calling_order_ = forward_order_;
  std::vector<size_t> order(reductions_.size());
  std::iota(order.rbegin(), order.rend(), size_t{0});
  update_reduced();
  adopt_order(std::move(order));
}

std::vector<at::Tensor> UnitPolicy::variables() const {
  std::vector<at::Tensor> tensors;
  tensors.reserve(variables_.size());
  for (size_t i = 0; i < variables_.size(); ++i) {
    tensors.push_back(parameter(i).tensor);
  }
  return tensors;
}

const NamedParameter& UnitPolicy::parameter(size_t variable) const {
  const Variable& found = variables_[variable];
  return reductions_[found.reduction].segment().parameters()[found.in_segment];
}

bool UnitPolicy::is_trained(size_t variable) const {
  return parameter(variable).tensor.requires_grad();
}

// What was added up of a frozen parameter is dropped.
void UnitPolicy::note_trained_changed() {
  is_trained_changed_ = true;
  for (size_t number = 0; number < variables_.size(); ++number) {
    if (!is_trained(number)) is_used_[number] = 0;
  }
  for (UnitReduction& reduction : reductions_) {
    if (reduction.segment().is_trained()) continue;
    memory_.release(reduction.segment().take_gradient_memory());
    reduction.segment().shard_gradient().drop_partial();
  }
}

bool UnitPolicy::expects_gradients() const {
  return std::ranges::any_of(reductions_, [](const UnitReduction& reduction) {
    return reduction.segment().is_trained();
  });
}

// Settings may change while a backward runs. Returns whether they are others
// than in the last one.
bool UnitPolicy::update_reduced() {
  std::vector<char> reduced;
  for (const UnitReduction& reduction : reductions_) {
    reduced.push_back(reduction.is_due() ? 1 : 0);
  }
  return std::exchange(is_reduced_, reduced) != reduced;
}

void UnitPolicy::adopt_order(std::vector<size_t> reductions) {
  reduction_order_ = std::move(reductions);
  sequence_.clear();
  places_.resize(reductions_.size());
  for (const size_t reduction : reduction_order_) {
    if (!is_reduced_[reduction]) continue;
    places_[reduction] = sequence_.size();
    reductions_[reduction].set_place(sequence_.size());
    sequence_.push_back(&reductions_[reduction]);
  }
  if (used_sum_) sequence_.push_back(used_sum_.get());
}

std::vector<size_t> UnitPolicy::expected_in_forward() const {
  std::vector<size_t> expected;
  for (const size_t unit : forward_order_) {
    if (!gathers_.is_current(unit)) expected.push_back(unit);
  }
  return expected;
}

std::vector<size_t> UnitPolicy::expected_in_backward() const {
  std::vector<size_t> expected =
      expected_in(follows_forward_ ? backward_of_forward_ : backward_order_);
  std::erase_if(expected,
                [this](size_t unit) { return reached_.is_left_out(unit); });
  return expected;
}

std::vector<size_t> UnitPolicy::expected_in(
    const std::vector<size_t>& backward) const {
  std::vector<size_t> expected;
  std::vector<char> is_whole(units_.size());
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    is_whole[unit] = gathers_.is_claimed(unit) ? 1 : 0;
  }
  for (const size_t unit : backward) {
    // The second time it has been released.
    if (!std::exchange(is_whole[unit], 0) &&
        units_[unit].settings.gathers_in_backward) {
      expected.push_back(unit);
    }
  }
  return expected;
}

std::vector<UnitPolicy::Awaited> UnitPolicy::awaited() const {
  std::vector<Awaited> by_reduction(reductions_.size());
  for (size_t number = 0; number < variables_.size(); ++number) {
    Awaited& awaited = by_reduction[variables_[number].reduction];
    awaited.unit = variables_[number].unit;
    if (is_trained(number) && !is_ready_[number] &&
        is_reduced_[variables_[number].reduction]) {
      awaited.variables.push_back(number);
    }
  }
  std::vector<Awaited> in_order;
  for (const size_t reduction : reduction_order_) {
    in_order.push_back(std::move(by_reduction[reduction]));
  }
  return in_order;
}

std::vector<size_t> UnitPolicy::awaited_of(size_t unit) const {
  std::vector<size_t> awaited;
  for (const size_t reduction : reductions_of_[unit]) {
    if (!is_reduced_[reduction] || num_missing_[reduction] == 0) continue;
    const size_t begin = first_variable_[reduction];
    for (size_t i = 0; i < reductions_[reduction].num_awaited(); ++i) {
      const size_t number = begin + i;
      if (is_trained(number) && !is_ready_[number]) awaited.push_back(number);
    }
  }
  return awaited;
}

std::vector<size_t> UnitPolicy::unreached() const {
  std::vector<size_t> units;
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    if (num_forwards_ == 1 && reached_.is_left_out(unit)) units.push_back(unit);
  }
  return units;
}

std::vector<size_t> UnitPolicy::units_ahead_of(size_t unit) const {
  std::vector<size_t> units;
  for (const size_t reduction : reduction_order_) {
    const size_t other = variables_[first_variable_[reduction]].unit;
    if (other == unit) break;
    if (is_reduced_[reduction] && num_missing_[reduction] > 0) {
      units.push_back(other);
    }
  }
  return units;
}

void UnitPolicy::note_forward(std::vector<size_t> record,
                              std::vector<size_t> backward) {
  ++num_forwards_;
  forward_record_ = std::move(record);
  backward_of_forward_ = completed(
      std::move(backward), {calling_order_.rbegin(), calling_order_.rend()});
}

void UnitPolicy::take(VariableIndex variable, const at::Tensor& gradient) {
  TORCH_CHECK(!refuses_gradients_,
              "fully_shard: a backward inside of unshard().\nLeave it first.");
  if (!is_trained(variable.parameter)) return;  // frozen since its forward
  const Variable& taken = variables_[variable.parameter];
  gathers_.record_use(taken.unit);
  reductions_[taken.reduction].segment().take(taken.in_segment, gradient,
                                              memory_);
}

at::Tensor UnitPolicy::gradient_slot(const at::Tensor& parameter) {
  const auto number = numbers_.find(parameter.unsafeGetTensorImpl());
  TORCH_CHECK_VALUE(number != numbers_.end(),
                    "fully_shard: expected a parameter that was sharded here, "
                    "as its module has it in forward, found a tensor of ",
                    parameter.sizes(), ".\nGive the parameter itself.");
  // Who asks for a gradient by torch::autograd::grad() is to keep it.
  if (running_backward_id() < 0 || !accumulates_all_gradients() ||
      !is_trained(number->second)) {
    return {};
  }
  const Variable& variable = variables_[number->second];
  return reductions_[variable.reduction].segment().gradient_slot(
      variable.in_segment, memory_);
}

std::string UnitPolicy::describe_sequence() const {
  return absl::StrCat(units_.size(), " units, ", variables_.size(),
                      " parameters");
}

uint64_t UnitPolicy::digest_of_settings() const {
  Digest digest;
  digest.add(sums_over_replicas_ ? 1 : 0);
  for (const Unit& unit : units_) {
    digest.add(
        std::bit_cast<uint64_t>(unit.settings.gradient_divisor.value_or(0)));
    digest.add(unit.settings.synchronizes ? 1 : 0);
    digest.add(unit.settings.sums_over_replicas ? 1 : 0);
  }
  for (size_t i = 0; i < variables_.size(); ++i) {
    digest.add(is_trained(i) ? 1 : 0);
  }
  return digest.value();
}

uint64_t UnitPolicy::backward_digest() const {
  return Digest()
      .add(digest_of_settings())
      .add_all(reduction_order_)
      .add_all(agreed_in_backward())
      .add_all(gathers_.in_slices())
      .add(used_sum_ ? memory_.max_reducing() : 0)
      .value();
}

uint64_t UnitPolicy::proposal() const {
  return Digest().add(order_digest(/*is_end=*/true)).add_all(is_used_).value();
}

uint64_t UnitPolicy::order_digest(bool is_end) const {
  Digest digest;
  digest.add_all(forward_record_);
  if (!is_end) {
    return digest.add(num_forwards_)
        .add_all(expected_in(backward_of_forward_))
        .add_all(reached_.noted())
        .value();
  }
  return digest.add_all(backward_of_forward_)
      .add_all(gathers_.schedule().record())
      .add_all(completion_)
      .value();
}

Replanned UnitPolicy::replan(const CallCollective& /*call*/) {
  const bool is_other = update_reduced();
  const bool is_changed = std::exchange(is_trained_changed_, false) || is_other;
  if (!next_reduction_order_ && !is_changed) return Replanned::kNotDue;
  std::vector<size_t> next =
      std::exchange(next_reduction_order_, {}).value_or(reduction_order_);
  if (next == reduction_order_ && !is_changed) return Replanned::kSameSequence;
  adopt_order(std::move(next));
  return Replanned::kOtherSequence;
}

// Of what is known already the backward is known too. Not the reverse of its
// forward is one that recomputes, or that goes through several.
void UnitPolicy::on_begun_together(bool has_one_order) {
  reached_.on_begun_together(has_one_order);
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    if (reached_.is_left_out(unit)) gathers_.drop_slices_of(unit);
  }
  follows_forward_ = has_one_order && num_forwards_ == 1 && is_predictable_ &&
                     forward_record_ != agreed_forward_;
}

void UnitPolicy::on_backward_begins(RunningIteration& iteration,
                                    bool /*is_shadow*/) {
  is_reducing_ = true;
  is_confirmed_ = false;
  is_ready_.assign(variables_.size(), 0);
  is_given_up_.assign(units_.size(), 0);
  completion_.clear();
  num_missing_.assign(reductions_.size(), 0);
  for (const Variable& variable : variables_) {
    ++num_missing_[variable.reduction];
  }
  for (UnitReduction& reduction : reductions_) {
    reduction.set_sums_over_replicas(sums_over_replicas_);
  }
  for (size_t number = 0; number < variables_.size(); ++number) {
    if (is_trained(number) || !is_reduced_[variables_[number].reduction]) {
      continue;
    }
    count_ready(number);
    mark_absent(number, iteration);
  }
  const std::vector<size_t> expected = expected_in_backward();
  expect_waits(expected);
  gathers_.begin(expected, GatheredIn::kBackward);
}

// The CPU's hosts wait for memory, and not for ever.
void UnitPolicy::expect_waits(const std::vector<size_t>& gathers) {
  if (!used_sum_) return;
  num_sums_alike_ = 0;
  waits_ = GatherWaits(gathers, reduced_units(), gathers_.schedule().depth(),
                       memory_.max_reducing());
  memory_.begin_backward([this] {
    return waits_.num_lendable(gathers_.schedule().num_launched());
  });
}

// What is late comes behind all gathers, and so behind any sum.
bool UnitPolicy::is_out_of_turn(size_t unit) const {
  const GatherSchedule& schedule = gathers_.schedule();
  if (!is_reducing_ || !used_sum_ || schedule.is_claimed(unit)) return false;
  const size_t num_launched = memory_.num_launched();
  const size_t gather = schedule.awaited_by(unit);
  if (gather < schedule.num_expected()) {
    return num_launched < waits_.sums_before(gather);
  }
  const size_t num_sums = sequence_.size() - 1;
  return num_launched < num_sums && num_launched != num_sums_alike_;
}

void UnitPolicy::on_local_gradient(VariableIndex variable, bool is_defined) {
  if (is_defined && is_trained(variable.parameter)) {
    is_used_[variable.parameter] = 1;
  }
}

std::optional<Slot> UnitPolicy::on_gradient(VariableIndex variable,
                                            bool is_defined) {
  const size_t number = variable.parameter;
  if (!is_trained(number)) return std::nullopt;
  if (is_defined) is_used_[number] = 1;
  if (!is_reduced_[variables_[number].reduction]) return std::nullopt;
  count_ready(number);
  return Slot{
      .entry = static_cast<uint32_t>(places_[variables_[number].reduction]),
      .has_gradient = is_defined};
}

void UnitPolicy::count_ready(size_t number) {
  const Variable& variable = variables_[number];
  is_ready_[number] = 1;
  // What no rank comes to is no order to follow: its turn is the last then.
  if (--num_missing_[variable.reduction] == 0 &&
      !reached_.is_left_out(variable.unit)) {
    completion_.push_back(variable.reduction);
  }
}

// Sums are not to be behind what waits for gathers.
void UnitPolicy::on_backward_ends(RunningIteration& iteration) {
  gathers_.launch_expected();
  for (size_t number = 0; number < variables_.size(); ++number) {
    if (is_ready_[number] || !is_reduced_[variables_[number].reduction]) {
      continue;
    }
    count_ready(number);
    mark_absent(number, iteration);
  }
}

void UnitPolicy::mark_absent(size_t number, RunningIteration& iteration) const {
  iteration.mark(
      number,
      {.entry = static_cast<uint32_t>(places_[variables_[number].reduction]),
       .has_gradient = false});
}

UnitPolicy::Seen UnitPolicy::seen() const {
  return {.forward = forward_record_,
          .predicted = backward_of_forward_,
          .backward = gathers_.schedule().record(),
          .completions = completion_};
}

void UnitPolicy::on_end_confirmed(ToldAlike alike) {
  is_confirmed_ = true;
  Seen last =
      unconfirmed_ ? *std::exchange(unconfirmed_, std::nullopt) : seen();
  if (alike.orders) adopt(std::move(last));
  if (alike.proposals || used_sum_) return;  // or it has travelled
  try {
    sum_used();
  } catch (...) {
    drop_gradients();
    listener_.on_backward_over(/*ended_well=*/false);
    throw;
  }
}

// From the next iteration on.
void UnitPolicy::adopt(Seen seen) {
  is_predictable_ = is_in_order(seen.backward, seen.predicted);
  const size_t num_needed = seen.forward.size();
  for (int& count : num_absent_) count = std::min(count + 1, kForgottenAfter);
  for (const size_t unit : seen.forward) num_absent_[unit] = 0;
  forward_order_ = completed(
      with_left_out(seen.forward, forward_order_, num_absent_), forward_order_);
  if (num_needed == units_.size() && forward_order_.size() == num_needed) {
    calling_order_ = forward_order_;
  }
  backward_order_ = completed(std::move(seen.backward),
                              {forward_order_.rbegin(), forward_order_.rend()});
  next_reduction_order_ =
      completed(std::move(seen.completions), reduction_order_);
  agreed_forward_ = std::move(seen.forward);
}

// What rows have summed in it is dropped on the ranks that have failed: here
// too, or later sums would have parts of it.
void UnitPolicy::on_end_refuted() {
  unconfirmed_.reset();
  drop_gradients();
}

// Of those that are trained.
bool UnitPolicy::has_used_all() const {
  for (size_t number = 0; number < variables_.size(); ++number) {
    if (!is_used_[number] && is_trained(number)) return false;
  }
  return true;
}

// Ranks have used different parameters, or in another order. What is not
// committed is summed again with the next.
void UnitPolicy::sum_used() {
  const at::Tensor used = at::from_blob(
      is_used_.data(), {static_cast<int64_t>(is_used_.size())}, at::kInt);
  transport_.all_reduce(used)->waitAndThrow();
  for (int32_t& is_used : is_used_) is_used = is_used == 0 ? 0 : 1;
}

std::vector<char> UnitPolicy::used_of(size_t reduction) const {
  const auto begin = is_used_.begin() +
                     static_cast<std::ptrdiff_t>(first_variable_[reduction]);
  const auto count =
      static_cast<std::ptrdiff_t>(reductions_[reduction].num_awaited());
  std::vector<char> used;
  for (auto it = begin; it != begin + count; ++it) used.push_back(*it != 0);
  return used;
}

void UnitPolicy::on_iteration_over(Outcome outcome, bool /*is_shadow*/) {
  is_reducing_ = false;
  waits_ = GatherWaits();
  if (outcome != Outcome::kDelivered) {
    drop_gradients();
    listener_.on_backward_over(/*ended_well=*/false);
    return;
  }
  memory_.reclaim_all();
  if (!is_confirmed_) unconfirmed_ = seen();
  gathers_.recorder().end(reduced_units());
  if (used_sum_ && !has_used_all()) used_sum_->read();
  std::vector<at::Tensor> hooked;
  for (const size_t i : reduction_order_) {
    if (!is_reduced_[i]) continue;
    const std::vector<char> used = used_of(i);
    reductions_[i].commit(used);
    if (!reductions_[i].sums_over_replicas()) continue;
    add_hooked(reductions_[i].segment(), used, hooked);
  }
  if (!hooked.empty()) call_hooks_behind_backward(std::move(hooked));
  for (size_t number = 0; number < variables_.size(); ++number) {
    const size_t reduction = variables_[number].reduction;
    if (is_reduced_[reduction] && reductions_[reduction].sums_over_replicas()) {
      is_used_[number] = 0;
    }
  }
  listener_.on_backward_over(/*ended_well=*/true);
}

std::vector<size_t> UnitPolicy::reduced_units() const {
  std::vector<size_t> units;
  for (const size_t reduction : reduction_order_) {
    if (!is_reduced_[reduction]) continue;
    units.push_back(variables_[first_variable_[reduction]].unit);
  }
  return units;
}

// All that is not committed.
void UnitPolicy::drop_gradients() {
  std::ranges::fill(is_used_, 0);
  for (UnitReduction& reduction : reductions_) {
    memory_.release(reduction.segment().take_gradient_memory());
    reduction.segment().shard_gradient().drop_partial();
  }
}

std::shared_ptr<void> UnitPolicy::abandon(
    std::span<Collective* const> /*in_flight*/) {
  return let_go();
}

std::shared_ptr<void> UnitPolicy::let_go() {
  auto kept = std::make_shared<std::vector<at::Tensor>>(memory_.abandon());
  for (UnitReduction& reduction : reductions_) {
    kept->push_back(reduction.segment().shard_gradient().abandon_pending());
  }
  return kept;
}

std::string UnitPolicy::name_of(std::span<const size_t> variables) const {
  return absl::StrCat(variables.size() == 1 ? "parameter " : "parameters ",
                      shortened_list(variables.size(), [&](size_t i) {
                        return absl::StrCat("'", parameter(variables[i]).name,
                                            "'");
                      }));
}

std::string UnitPolicy::describe_missing(std::span<const size_t> variables,
                                         Occasion occasion) const {
  return absl::StrCat(name_of(variables), " got no gradient in ",
                      describe(occasion), ".");
}

std::string UnitPolicy::describe_late(VariableIndex variable,
                                      Occasion occasion) const {
  const size_t number = variable.parameter;
  return absl::StrCat("the gradient of ", name_of({&number, 1}), " came when ",
                      describe(occasion), " was over.");
}

void UnitPolicy::refuse(VariableIndex variable, Occasion occasion) const {
  const size_t number = variable.parameter;
  TORCH_CHECK(
      !is_given_up_[variables_[number].unit], "the gradient of ",
      name_of({&number, 1}), " came in ", describe(occasion),
      " when backward had left all calls of its unit, or no graph held one."
      "\nUse parameters inside of calls of their unit, in graphs that live "
      "until backward.");
  TORCH_CHECK(false, "the gradient of ", name_of({&number, 1}),
              " was ready twice in ", describe(occasion),
              ": its unit is called several times in checkpoints that run "
              "backward inside of backward.\nUse checkpoints that don't "
              "(use_reentrant=False).");
}

}  // namespace brigade
