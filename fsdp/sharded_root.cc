#include "brigade/fsdp/sharded_root.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "brigade/comm/rank_status.h"
#include "brigade/hooks/backward_end.h"
#include "brigade/hooks/input_gate.h"
#include "brigade/hooks/output_watch.h"

namespace brigade {
namespace {

c10::Device device_of(const std::vector<Unit>& units) {
  return units.empty() ? at::kCPU : units.front().segments.front()->device();
}

// The one of all ranks first.
std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups_of(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const MeshTransports& transports) {
  std::vector groups = {group};
  for (auto& own : transports.own_groups()) groups.push_back(std::move(own));
  TORCH_CHECK_VALUE(
      groups.size() <= kMaxGroups, "fully_shard: expected meshes of ",
      kMaxGroups, " process groups at most on a device, found ", groups.size(),
      ".\nShard the units that differ over one mesh.");
  return groups;
}

uint64_t digest_of(std::string_view words, const std::vector<size_t>& units) {
  uint64_t digest = std::hash<std::string_view>{}(words);
  for (const size_t unit : units) digest = c10::hash_combine(digest, unit);
  return digest | 1;  // never 0, which would be none
}

// A frozen parameter has an accumulator for gradients, too, as long as this
// lives: whoever gets hold of it then has it when the parameter is thawed.
class AllTrained {
 public:
  explicit AllTrained(std::vector<at::Tensor> parameters)
      : parameters_(std::move(parameters)) {
    for (at::Tensor& parameter : parameters_) {
      was_trained_.push_back(parameter.requires_grad() ? 1 : 0);
      parameter.set_requires_grad(true);
    }
  }
  ~AllTrained() {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      parameters_[i].set_requires_grad(was_trained_[i] != 0);
    }
  }
  AllTrained(const AllTrained&) = delete;
  AllTrained& operator=(const AllTrained&) = delete;

 private:
  std::vector<at::Tensor> parameters_;
  std::vector<char> was_trained_;
};

// Of a shard among those of its unit.
size_t place_of(const Unit& unit, const at::Tensor& shard) {
  const auto found = std::ranges::find_if(
      unit.shards,
      [&](const at::Tensor& other) { return other.is_same(shard); });
  return static_cast<size_t>(found - unit.shards.begin());
}

}  // namespace

ShardedRoot::ShardedRoot(const std::vector<UnitSpec>& units,
                         c10::intrusive_ptr<c10d::ProcessGroup> group,
                         ShardingOptions options)
    : ShardedRoot(make_units(units, group, options), group, options) {}

ShardedRoot::ShardedRoot(std::vector<Unit> units,
                         c10::intrusive_ptr<c10d::ProcessGroup> group,
                         ShardingOptions options)
    : group_(std::move(group)),
      options_(options),
      transports_(group_, options_.num_shards.value_or(group_->getSize()),
                  device_of(units), units),
      pool_(streams().device()),
      gradient_memory_(pool_, streams(),
                       std::max<size_t>(options.max_reducing, 1)),
      units_(std::move(units)) {
  uint64_t fingerprint = units_.size();
  for (const Unit& unit : units_) {
    fingerprint =
        c10::hash_combine(fingerprint, unit.settings.reshards_after_forward);
    fingerprint =
        c10::hash_combine(fingerprint, unit.settings.reshards_to.value_or(0));
    for (const auto& segment : unit.segments) {
      const int num_shards = transports_.of(unit).num_shards();
      TORCH_CHECK_VALUE(segment->layout().num_ranks() == num_shards,
                        "fully_shard: unit '", unit.name, "' has ",
                        segment->layout().num_ranks(),
                        " shards, its mesh has rows of ", num_shards,
                        " ranks.\nMake it by the same options.");
      fingerprint =
          c10::hash_combine(fingerprint, segment->layout().fingerprint());
    }
  }
  num_running_.assign(units_.size(), 0);
  num_open_.assign(units_.size(), 0);
  is_kept_.assign(units_.size(), 0);
  gathers_ = std::make_unique<UnitGathers>(units_, transports_, pool_,
                                           options_.prefetch_depth);
  policy_ = std::make_unique<UnitPolicy>(
      units_, transports_, *gathers_, gradient_memory_,
      static_cast<UnitPolicy::Listener&>(*this), fingerprint);
  const AllTrained all_trained(policy_->variables());
  const std::vector<std::vector<at::Tensor>> variables = {policy_->variables()};
  engine_ = std::make_unique<Engine>(
      groups_of(group_, transports_), variables, *policy_,
      EngineOptions{.name = "fully_shard",
                    .defers_status_check = !pool_.device().is_cpu(),
                    .failure_patience = options_.failure_patience,
                    .one_backward_per_forward = false,
                    .sink = policy_.get(),
                    .launches_rest_when_failing = true});
  engine_->connect();
}

ShardedRoot::~ShardedRoot() { alive_ = nullptr; }

std::vector<at::Tensor> ShardedRoot::shards() const {
  std::vector<at::Tensor> all;
  for (const Unit& unit : units_) {
    all.insert(all.end(), unit.shards.begin(), unit.shards.end());
  }
  return all;
}

void ShardedRoot::ask(std::string_view words,
                      const std::vector<size_t>& expected) {
  ask_with(words, digest_of(words, expected));
}

void ShardedRoot::ask_with(std::string_view words, uint64_t digest) {
  try {
    engine_->ask(words, digest);
  } catch (...) {
    peers_know_ = true;
    on_backward_over(/*ended_well=*/false);
    throw;
  }
}

// ---- Forward.

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
  plan_memory();
  claim_kept();
  release_outdated();
  const std::vector<size_t> expected = policy_->expected_in_forward();
  ask("began a forward", expected);
  gathers_->shards_are_written();
  gathers_->begin(expected, GatheredIn::kForward);
  if (pass_ == Pass::kNone) pass_ = Pass::kForward;
}

MemoryPlan ShardedRoot::make_plan() const {
  std::vector<PlannedUnit> units;
  units.reserve(units_.size());
  for (const Unit& unit : units_) {
    PlannedUnit& planned = units.emplace_back();
    planned.settings = unit.settings;
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
  absl::StatusOr<MemoryPlan> plan = MemoryPlan::create(
      units, options_.prefetch_depth, gradient_memory_.max_reducing());
  TORCH_CHECK_VALUE(plan.ok(),
                    "fully_shard: ", std::string(plan.status().message()));
  return *std::move(plan);
}

// Once: buffers are lent from here on.
void ShardedRoot::plan_memory() {
  if (planned_bytes_) return;
  const MemoryPlan plan = make_plan();
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    auto& segments = units_[unit].segments;
    for (size_t i = 0; i < segments.size(); ++i) {
      segments[i]->set_planned(plan.of(unit, i));
    }
  }
  pool_.plan(plan.buffer_bytes());
  planned_bytes_ = plan.total_bytes();
}

void ShardedRoot::end_forward() {
  if (pass_ == Pass::kBackward) return;
  gathers_->launch_rest();
  if (keeps_units_) {
    policy_->note_forward(gathers_->schedule().record());
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
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    if (gathers_->schedule().is_there(unit) && is_kept_[unit] == 0) {
      release_behind_forward(unit);
    }
  }
  if (pass_ == Pass::kForward) pass_ = Pass::kNone;
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
  if (is_changed) policy_->note_trained_changed();
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
  if (pass_ == Pass::kForward) pass_ = Pass::kNone;
  if (!peers_know_) engine_->fail(error);
}

// What is whole and was gathered before its shards changed.
void ShardedRoot::release_outdated() {
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    if (gathers_->is_claimed(unit) && !gathers_->is_current(unit)) {
      release_if_unused(unit);
    }
  }
}

void ShardedRoot::need(size_t unit) {
  const UnitSettings& settings = units_[unit].settings;
  const std::vector<size_t>& ahead = pass_ == Pass::kBackward
                                         ? settings.backward_prefetch
                                         : settings.forward_prefetch;
  gathers_->need(unit, ahead, [&] {
    const std::string words =
        absl::StrCat("needed unit '", units_[unit].name, "' again");
    // Its name may be another one on other meshes.
    ask_with(words, digest_of("needed a unit again", {unit}));
  });
}

std::shared_ptr<ShardedRoot::Call> ShardedRoot::begin_call(
    size_t unit, std::span<at::Tensor> inputs) {
  if (running_backward_id() < 0 && num_running_[unit] == 0 &&
      gathers_->is_claimed(unit) && !gathers_->is_current(unit)) {
    gathers_->release(unit);
  }
  need(unit);
  ++num_running_[unit];
  const auto call = std::make_shared<Call>(
      Call{.unit = unit, .version = version_of(units_[unit])});
  gate_inputs(inputs, alive_, [this, call] { close(*call); });
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
  if (at::GradMode::is_enabled()) {
    watch_outputs(outputs, alive_, [this, call] { open(call); });
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

void ShardedRoot::release_if_unused(size_t unit) {
  if (num_running_[unit] > 0 || num_open_[unit] > 0) return;
  if (pass_ == Pass::kApart) return;
  is_kept_[unit] = 0;
  gathers_->release(unit);
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

// ---- Backward.

void ShardedRoot::open(const std::shared_ptr<Call>& call) {
  if (pass_ != Pass::kBackward) begin_backward();
  const size_t unit = call->unit;
  TORCH_CHECK(call->version == version_of(units_[unit]),
              "fully_shard: the parameters of unit '", units_[unit].name,
              "' were changed between its forward and its backward.\nRun "
              "backward before the optimizer's step.");
  if (call->open_in != backward_) {
    call->open_in = backward_;
    ++num_open_[unit];
  }
  if (units_[unit].settings.gathers_in_backward) need(unit);
}

void ShardedRoot::close(Call& call) {
  if (call.open_in != backward_ || pass_ != Pass::kBackward) return;
  call.open_in = 0;
  gathers_->note_use(call.unit);
  --num_open_[call.unit];
  if (units_[call.unit].settings.spans_passes) return;
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
  TORCH_CHECK(pass_ != Pass::kApart,
              "fully_shard: a backward inside of unshard().\nLeave it first.");
  claim_kept();
  ++backward_;
  if (synchronizes_ && accumulates_all_gradients()) {
    try {
      engine_->begin_in_backward();
    } catch (...) {  // perhaps of an iteration before, which was told late
      on_backward_over(/*ended_well=*/false);
      throw;
    }
    pass_ = Pass::kBackward;
    return;
  }
  const std::vector<size_t> expected = policy_->expected_in_backward();
  std::vector<size_t> told = expected;
  const std::vector<int> in_slices = gathers_->in_slices();
  told.insert(told.end(), in_slices.begin(), in_slices.end());
  ask("began a backward that is not reduced", told);
  gathers_->begin(expected, GatheredIn::kBackward);
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

void ShardedRoot::on_backward_over(bool ended_well) {
  if (pass_ == Pass::kApart) return;
  end_backward(ended_well);
  leave_backward();
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
    // As in forward_failed().
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
  if (!ended_well) gathers_->drop_slices();
  is_behind_backward_ = ended_well;
}

void ShardedRoot::reduce() {
  await_backward();
  TORCH_CHECK(pass_ == Pass::kNone,
              "fully_shard: gradients are to be reduced inside of a forward or "
              "backward, or of unshard().\nDo so between them.");
  TORCH_CHECK(synchronizes_,
              "fully_shard: gradients are to be reduced, but synchronisation "
              "is off.\nSwitch it on first.");
  run_empty_backward();
}

void ShardedRoot::run_empty_backward() {
  const at::AutoGradMode with_graph(true);
  const at::Tensor leaf = at::zeros({}).set_requires_grad(true);
  const at::Tensor output = leaf.mul(1);
  watch_outputs({&output, 1}, alive_, [this] {
    if (pass_ != Pass::kBackward) begin_backward();
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
    if (synchronizes_) {
      for (const size_t variable : variables) {
        engine_->gradient_ready({.replica = 0, .parameter = variable},
                                /*is_defined=*/false);
      }
    }
    leave(unit);
  }
  gather_before(gathered.end());
}

// ---- Ranks without data.

int64_t ShardedRoot::num_ranks_with(bool has_data) {
  ask("tells whether it has data", {});
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

// ---- Between them.

void ShardedRoot::unshard() {
  await_backward();
  TORCH_CHECK(pass_ == Pass::kNone,
              "fully_shard: unshard() inside of a forward or backward, or of "
              "another unshard().\nCall it between them.");
  claim_kept();
  release_outdated();
  std::vector<size_t> expected;
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    if (!gathers_->is_current(unit)) expected.push_back(unit);
  }
  ask("gathers all units", expected);
  gathers_->shards_are_written();
  gathers_->begin(expected);
  pass_ = Pass::kApart;
  for (size_t unit = 0; unit < units_.size(); ++unit) need(unit);
}

void ShardedRoot::reshard(bool writes) {
  if (pass_ != Pass::kApart) return;
  pass_ = Pass::kNone;
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    for (const auto& segment : units_[unit].segments) {
      if (writes && segment->is_bound()) segment->read_own_slice();
    }
    release_if_unused(unit);
  }
}

const Unit& ShardedRoot::unit_of(const Segment& segment) const {
  const auto has_it = [&](const Unit& unit) {
    return std::ranges::any_of(
        unit.segments, [&](const auto& one) { return one.get() == &segment; });
  };
  return *std::ranges::find_if(units_, has_it);
}

at::Tensor ShardedRoot::gather(const Segment& segment,
                               const at::Tensor& shard) {
  const at::NoGradGuard no_grad;
  ask("gathers shards", {static_cast<size_t>(shard.numel())});
  at::Tensor whole =
      at::empty({segment.layout().whole_numel()}, shard.options());
  whole.narrow(0, segment.rank() * shard.numel(), shard.numel()).copy_(shard);
  transports_.of(unit_of(segment)).all_gather(whole)->waitAndThrow();
  return whole;
}

std::vector<at::Tensor> ShardedRoot::gather_unit(size_t unit) {
  const at::NoGradGuard no_grad;
  const Unit& gathered = units_.at(unit);
  std::vector<at::Tensor> wholes(gathered.shards.size());
  for (const auto& segment : gathered.segments) {
    const at::Tensor whole = gather(*segment, segment->shard());
    for (size_t i = 0; i < segment->shards().size(); ++i) {
      wholes[place_of(gathered, segment->shards()[i])] =
          segment->whole_of(whole, i).clone();
    }
  }
  return wholes;
}

void ShardedRoot::assign_unit(size_t unit, std::span<const at::Tensor> wholes) {
  const Unit& assigned = units_.at(unit);
  for (const auto& segment : assigned.segments) {
    for (size_t i = 0; i < segment->shards().size(); ++i) {
      segment->assign(i, wholes[place_of(assigned, segment->shards()[i])]);
    }
  }
}

bool ShardedRoot::has_own_meshes() const {
  return std::ranges::any_of(
      units_, [](const Unit& unit) { return unit.mesh.has_value(); });
}

bool ShardedRoot::has_other_units_elsewhere() const {
  return std::ranges::any_of(units_, [this](const Unit& unit) {
    return unit.mesh && unit.mesh->size() < group_->getSize();
  });
}

bool ShardedRoot::is_first_replica(size_t unit) const {
  const Unit& asked = units_.at(unit);
  const int rank = group_->getRank();
  return (asked.mesh ? asked.mesh->place_of(rank) : rank) <
         transports_.of(asked).num_shards();
}

// One place for each rank, so that all add up, or compare, in one order.
void ShardedRoot::sum_over_ranks(const at::Tensor& values, bool takes_largest) {
  const at::NoGradGuard no_grad;
  ask("sums over ranks", {static_cast<size_t>(values.numel())});
  const int num_ranks = group_->getSize();
  at::Tensor by_rank = at::zeros({num_ranks, values.numel()}, values.options());
  by_rank[group_->getRank()].copy_(values);
  transports_.root().all_reduce(by_rank)->waitAndThrow();
  values.copy_(by_rank[0]);
  for (int rank = 1; rank < num_ranks; ++rank) {
    if (takes_largest) {
      at::Tensor largest = values;
      at::maximum_out(largest, values, by_rank[rank]);
    } else {
      values.add_(by_rank[rank]);
    }
  }
}

double ShardedRoot::clip_grad_norm(double max_norm, double p) {
  TORCH_CHECK_VALUE(p > 0, "clip_grad_norm: expected p > 0, found ", p,
                    ".\nGive 2 for the Euclidean norm, or infinity.");
  const at::NoGradGuard no_grad;
  const bool is_max = std::isinf(p);
  double total = 0;
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    if (!is_first_replica(unit)) continue;
    for (const at::Tensor& shard : units_[unit].shards) {
      if (!shard.grad().defined() || shard.numel() == 0) continue;
      const double norm =
          at::linalg_vector_norm(shard.grad(), p, at::OptionalIntArrayRef(),
                                 /*keepdim=*/false, at::kDouble)
              .item<double>();
      total = is_max ? std::max(total, norm) : total + std::pow(norm, p);
    }
  }
  const at::Tensor sum = at::full({1}, total, at::kDouble);
  sum_over_ranks(sum, is_max);
  total = sum.item<double>();
  const double norm = is_max ? total : std::pow(total, 1 / p);
  const double factor = max_norm / (norm + 1e-6);
  if (factor < 1) {
    for (const Unit& unit : units_) {
      for (const at::Tensor& shard : unit.shards) {
        if (shard.grad().defined()) shard.grad().mul_(factor);
      }
    }
  }
  return norm;
}

void ShardedRoot::set_max_reducing(size_t value) {
  TORCH_CHECK_VALUE(value > 0,
                    "fully_shard: expected room for at least 1 reduction, "
                    "found 0.\nGive 2, for instance.");
  gradient_memory_.set_max_reducing(value);
}

void ShardedRoot::shards_changed() {
  for (const Unit& unit : units_) {
    for (const auto& segment : unit.segments) {
      segment->shard().unsafeGetTensorImpl()->bump_version();
    }
  }
}

ShardingStatistics ShardedRoot::statistics() const {
  ShardingStatistics statistics = {
      .late_gathers = static_cast<int64_t>(gathers_->schedule().num_late()),
      .ahead_gathers = static_cast<int64_t>(gathers_->schedule().num_ahead()),
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

std::string ShardedRoot::explain() const {
  const ShardingStatistics memory = statistics();
  std::string text = absl::StrCat(
      units_.size(), units_.size() == 1 ? " unit" : " units", ", ",
      num_shards(), " shards, ", transports_.root().num_replicas(),
      " replicas, on ", pool_.device().str(),
      "; whole units and gradients take ", memory.planned_bytes,
      " bytes by plan, took at most ", memory.peak_whole_bytes, " so far\n");
  for (const Unit& unit : units_) {
    for (const auto& segment : unit.segments) {
      absl::StrAppend(
          &text, "  '", unit.name, "': ", segment->parameters().size(),
          " parameters, ", segment->whole_bytes(), " bytes whole, ",
          segment->layout().shard_numel() * segment->shard().element_size(),
          " bytes here, ", segment->layout().padding_numel(),
          " elements of padding", segment->is_trained() ? "" : ", frozen",
          unit.settings.reshards_after_forward
              ? ""
              : ", whole from forward to backward",
          unit.settings.keeps_slices()
              ? absl::StrCat(", in slices on ", *unit.settings.reshards_to,
                             " ranks in between")
              : "",
          unit.mesh ? absl::StrCat(", over ", describe(*unit.mesh)) : "", "\n");
    }
  }
  return text;
}

}  // namespace brigade
