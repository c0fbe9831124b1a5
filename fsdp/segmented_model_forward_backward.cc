// Forwards and backwards of SegmentedModel: opens, runs and closes segments.

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <bit>
#include <type_traits>
#include <utility>

#include "brigade/comm/agreement.h"
#include "brigade/comm/process_group.h"
#include "brigade/fsdp/segmented_model.h"

namespace brigade {

// ---- Segments.

// Calls visit(setting, unit, parameter, value) with each setting that must be
// equal on all ranks during a segment. `parameter`: null if it is the unit's.
template <typename Visit>
void SegmentedModel::visit_settings(const Visit& visit) const {
  for (const ShardedUnit& unit : units_) {
    const UnitSettings& settings = unit.settings;
    const auto of_unit = [&](const char* setting, auto value) {
      visit(setting, unit, static_cast<const UnitParameter*>(nullptr), value);
    };
    of_unit("max_reducing", max_reducing_);
    of_unit("reshard_after_forward", settings.reshard_after_forward);
    of_unit("reshard_to", settings.reshard_to.value_or(0));
    of_unit("reshard_after_backward", settings.reshard_after_backward);
    of_unit("gradient synchronization", reduces(unit));
    of_unit("sums_over_replicas", settings.sums_over_replicas);
    of_unit("gathers_in_backward", settings.gathers_in_backward);
    of_unit("keeps_storage", settings.keeps_storage);
    of_unit("gradient_divisor", unit.divisor());
    for (const auto& flat : unit.flats) {
      for (size_t i = 0; i < flat->parameters().size(); ++i) {
        const UnitParameter* const parameter = &flat->parameters()[i];
        visit("requires_grad", unit, parameter, flat->is_trained(i));
        visit("dtype", unit, parameter, flat->dtype());
        visit("device", unit, parameter, flat->device().type());
      }
    }
  }
}

uint64_t SegmentedModel::settings_hash() const {
  std::vector<uint64_t> numbers;
  visit_settings(
      [&](const char*, const ShardedUnit&, const UnitParameter*, auto value) {
        if constexpr (std::is_same_v<decltype(value), double>) {
          numbers.push_back(std::bit_cast<uint64_t>(value));
        } else {
          numbers.push_back(static_cast<uint64_t>(value));
        }
      });
  return hash_of(numbers);
}

// Collective.
void SegmentedModel::require_equal_settings() const {
  std::vector<std::string> items;
  visit_settings([&](const char* setting, const ShardedUnit& unit,
                     const UnitParameter* parameter, auto value) {
    // The names of experts differ between meshes.
    items.push_back(c10::str(setting, " of ",
                             parameter == nullptr || unit.mesh
                                 ? describe_unit(unit.name)
                                 : c10::str("'", parameter->name, "'"),
                             ": ", value));
  });
  require_agreement(group_, "fully_shard: setting", items, absl::OkStatus());
}

bool SegmentedModel::stays_unsharded_after(const SegmentRun::Plan& plan,
                                           size_t unit) const {
  const UnitSettings& settings = units_[unit].settings;
  if (plan.kind != SegmentKind::kForward) {
    return !settings.reshard_after_backward;
  }
  return plan.unsharded[unit] != 0 ||
         (plan.has_grad && !settings.reshard_after_forward);
}

UnitRules SegmentedModel::rules_for(const SegmentRun::Plan& plan) const {
  UnitRules rules = {.prefetch_depth = options_.prefetch_depth};
  for (size_t i = 0; i < units_.size(); ++i) {
    const UnitSettings& settings = units_[i].settings;
    rules.parents.push_back(units_[i].parent);
    const bool stays = settings.spans_segments || units_[i].is_by_hand ||
                       stays_unsharded_after(plan, i);
    rules.stays.push_back(stays ? 1 : 0);
    rules.prefetch_depths.push_back(prefetch_depth_of(units_[i], plan.kind));
  }
  return rules;
}

size_t SegmentedModel::prefetch_depth_of(const ShardedUnit& unit,
                                         SegmentKind kind) const {
  return (kind == SegmentKind::kForward ? unit.settings.forward_prefetch_depth
                                        : unit.settings.backward_prefetch_depth)
      .value_or(options_.prefetch_depth);
}

OpeningMessage SegmentedModel::opening_of(SegmentKind kind) {
  std::erase_if(forwards_, [](const auto& forward) {
    const auto alive = forward.lock();
    return !alive || alive->is_done;
  });
  std::vector<uint64_t> has_slices;
  std::vector<uint64_t> state;
  for (const ShardedUnit& unit : units_) {
    has_slices.push_back(unit.slices.empty() ? 0 : 1);
    state.push_back(unit.gathered ? 1 : 0);
    const bool holds =
        kind == SegmentKind::kBackward && has_held_gradients(unit);
    state.push_back(holds ? 1 : 0);
  }
  const bool has_any = std::ranges::find(has_slices, 1) != has_slices.end();
  OpeningMessage opening = {.kind = kind,
                            .settings = settings_hash(),
                            .slices = has_any ? hash_of(has_slices) : 0};
  bool mode = false;
  if (kind == SegmentKind::kForward) {
    mode = at::GradMode::is_enabled();
  } else if (kind != SegmentKind::kWithoutData && running_backward_id() >= 0) {
    mode = accumulates_all_gradients();
  }
  state.insert(state.end(), {static_cast<uint64_t>(kind), opening.settings,
                             forwards_.size(), opening.slices, mode ? 1U : 0U});
  // The last bit tells the mode to ranks without data.
  opening.tag = (hash_of(state) & ~uint64_t{1}) | (mode ? 1 : 0);
  if (const auto* const schedule = schedule_for(opening.tag, kind)) {
    opening.schedule = schedule->fingerprint();
  }
  return opening;
}

// Depths may change between segments.
const RecordedSchedule* SegmentedModel::schedule_for(uint64_t tag,
                                                     SegmentKind kind) {
  const auto known = schedules_.find(tag);
  if (known == schedules_.end()) return nullptr;
  size_t depth = 1;
  for (const ShardedUnit& unit : units_) {
    depth = std::max(depth, prefetch_depth_of(unit, kind));
  }
  if (depth == 1) return &known->second;
  advanced_ = known->second;
  advanced_.advance_gathers(depth);
  return &advanced_;
}

OpeningMessage SegmentedModel::exchange_opening(const OpeningMessage& opening) {
  const auto num_steps =
      static_cast<size_t>(options_.max_unconfirmed_iterations);
  const bool awaits =
      is_cpu() || num_steps == 0 || opening.kind == SegmentKind::kWithoutData;
  try {
    if (!is_cpu() && opening.kind == SegmentKind::kForward) {
      exchange_.confirm(at::GradMode::is_enabled() ? 2 * num_steps : 0);
    }
    OpeningMessage opened = exchange_.open(opening, awaits);
    if (opened.settings == 0) {
      if (is_cpu() || num_steps == 0) require_equal_settings();
      throw_peer_failure(
          "fully_shard: expected the same settings, dtypes and trained "
          "parameters on every rank, found a difference.\nMake the same "
          "changes on every rank, between the same forwards.");
    }
    return opened;
  } catch (...) {
    if (exchange_.is_broken() || !is_cpu()) close_groups();
    throw;
  }
}

void SegmentedModel::open(SegmentKind kind, const ForwardRecord* reached) {
  prepare();
  const OpeningMessage opening = opening_of(kind);
  const OpeningMessage opened = exchange_opening(opening);
  const bool is_forward = opened.kind == SegmentKind::kForward;
  const bool has_data = kind != SegmentKind::kWithoutData;
  const bool has_grad =
      has_data ? at::GradMode::is_enabled() : (opened.tag & 1) != 0;
  SegmentRun::Plan plan = {
      .kind = opened.kind,
      .tag = has_data ? opening.tag : opened.tag,
      .tags = opened.tags,
      .has_grad = has_grad,
      .expected = kind == SegmentKind::kBackward
                      ? expected_gradients(reached)
                      : std::vector<uint32_t>(units_.size(), 0),
      .has_slices = opened.slices != 0 && !is_forward,
      .keeps_slices = is_forward && has_grad,
      .max_reducing = max_reducing_,
      .may_end_unconfirmed =
          !is_cpu() && options_.max_unconfirmed_iterations > 0,
      .buffer_bytes = memory_.total_bytes()};
  for (ShardedUnit& unit : units_) {
    plan.unsharded.push_back(unit.gathered ? 1 : 0);
    if (is_forward) unit.slices.clear();
  }
  plan.rules = rules_for(plan);
  if (opened.schedule != 0) plan.schedule = schedule_for(plan.tag, plan.kind);
  run_.emplace(parts(), std::move(plan));
  ++statistics_.segments;
  statistics_.learned_segments += run_->cursor().is_learning() ? 1 : 0;
  is_in_forward_ = is_forward;
  show_compute_dtypes(true);
}

// Ranks keep or drop the schedule together, even if one of them fails
// afterwards. All have it under each tag: a rank without data takes a peer's.
void SegmentedModel::finish(const std::vector<char>& used, bool has_used_all) {
  run_->finish(used, has_used_all);
  const SegmentCursor& cursor = run_->cursor();
  const SegmentRun::Plan& plan = run_->plan();
  if (cursor.has_deviated()) {
    schedules_.erase(plan.tag);
  } else if (cursor.is_learning()) {
    for (const uint64_t tag : plan.tags) schedules_[tag] = cursor.record();
    step_[plan.kind] = cursor.record().entries;
  }
}

// REQUIRES: finish() returned.
void SegmentedModel::close() {
  const SegmentCursor& cursor = run_->cursor();
  const SegmentRun::Plan& plan = run_->plan();
  statistics_.rounds += static_cast<int64_t>(cursor.num_rounds()) - 1;
  statistics_.late_gradients += static_cast<int64_t>(cursor.num_late());
  for (size_t i = 0; i < units_.size(); ++i) {
    ShardedUnit& unit = units_[i];
    if (!unit.gathered || unit.is_by_hand) continue;
    if (!stays_unsharded_after(plan, i)) {
      run_->release(i);
    } else {
      unit.unbind();
    }
    if (plan.kind != SegmentKind::kForward) unit.slices.clear();
  }
  // Training steps that repeat their schedules keep their buffers.
  if (cursor.is_learning() && plan.kind == SegmentKind::kBackward) {
    memory_.shrink_to(0);
  } else if (cursor.is_learning() || cursor.has_deviated() ||
             statistics_.reduced_backwards == 0) {
    memory_.shrink_to(plan.buffer_bytes);
  }
  end_run();
}

void SegmentedModel::end_run() noexcept {
  run_.reset();
  is_in_forward_ = false;
  nested_forwards_ = 0;
  show_compute_dtypes(false);
  run_ended_.notify_all();
}

void SegmentedModel::abandon(const std::string& error) noexcept {
  hidden_hooks_.reset();
  if (!run_) return;
  run_->fail(error);
  recorder_.step_fails();
  if (!run_->has_finished()) {
    schedules_.erase(run_->plan().tag);
    for (const uint64_t tag : run_->plan().tags) schedules_.erase(tag);
  }
  std::fill(used_in_forward_.begin(), used_in_forward_.end(), 0);
  std::fill(used_.begin(), used_.end(), 0);
  if (run_->is_broken() || exchange_.is_broken()) {
    try {
      throw_peer_failure(error);
    } catch (...) {
      close_groups();
    }
  } else {
    for (size_t i = 0; i < units_.size(); ++i) run_->release(i);
    memory_.shrink_to(0);
  }
  end_run();
}

void SegmentedModel::close_groups() noexcept {
  if (is_broken_.exchange(true)) return;
  broken_reason_ = "a rank failed or is lost.";
  try {
    if (const auto error = std::current_exception()) {
      broken_reason_ = message_of(error);
      exchange_.channel().abort(error);
    }
  } catch (...) {
  }
  meshes_->close_groups();
  close_group(*group_);
}

// ---- Forward.

void SegmentedModel::begin_forward() {
  const auto lock = lock_between_segments();
  if (running_backward_id() >= 0) {  // recomputation
    if (!is_open()) open_backward();
    return;
  }
  if (is_open() && (!is_in_forward_ || !is_forward_thread())) {
    try {
      TORCH_CHECK(false,
                  "fully_shard: expected one forward or backward at a time, "
                  "found a forward during one in another thread.\nBoth are "
                  "collective: run them one after the other.");
    } catch (...) {  // the open one fails too: it may be another one on peers
      run_->record_error();
      throw;
    }
  }
  if (is_in_forward_) {
    ++nested_forwards_;
    return;
  }
  forward_thread_ = std::this_thread::get_id();
  std::fill(used_in_forward_.begin(), used_in_forward_.end(), 0);
  recorder_.forward_begins();
  open(SegmentKind::kForward);
  run_or_abandon([this] {
    if (forward_check_) forward_check_();
    run_->begin();
  });
}

// Returns true if the calling thread's outermost forward ends.
bool SegmentedModel::leave_forward() {
  if (!is_in_forward_ || !is_forward_thread() || running_backward_id() >= 0) {
    return false;
  }
  if (nested_forwards_ == 0) return true;
  --nested_forwards_;
  return false;
}

void SegmentedModel::end_forward(const std::vector<at::Tensor>& outputs) {
  const std::lock_guard lock(mutex_);
  if (!leave_forward()) return;
  const bool has_grad = run_->plan().has_grad;
  run_or_abandon([&] {
    // The loss may use parameters of the outermost unit (use_after_forward()).
    constexpr size_t kOutermost = 0;
    const ShardedUnit& outermost = units_[kOutermost];
    if (has_grad && !outermost.parent &&
        !outermost.settings.reshard_after_forward) {
      run_->use(std::span(&kOutermost, 1));
    }
    finish({}, /*has_used_all=*/true);
    close();
  });
  recorder_.forward_ends();
  if (!has_grad) return;
  auto record = std::make_shared<ForwardRecord>();
  record->used = used_in_forward_;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    record->used[i] &= parameters_[i].is_trained() ? 1 : 0;
  }
  forwards_.push_back(record);
  last_forward_ = record;
  watch_outputs(outputs, alive_, [this, record] {
    const std::lock_guard reached(mutex_);
    if (!is_open() && running_backward_id() != last_backward_) {
      open_backward(record.get());
    }
    record->is_done = true;
  });
}

void SegmentedModel::forward_failed(const std::exception_ptr& error) noexcept {
  const std::lock_guard lock(mutex_);
  if (leave_forward()) abandon(message_of(error));
}

// ---- Backward.

std::vector<uint32_t> SegmentedModel::expected_gradients(
    const ForwardRecord* reached) const {
  std::vector<uint32_t> expected(units_.size(), 0);
  const auto add = [&](const ForwardRecord& record) {
    std::vector<uint32_t> used(units_.size(), 0);  // trained parameters
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const size_t unit = parameters_[i].unit;
      if (record.used[i] == 0 || !parameters_[i].is_trained()) continue;
      if (!reduces(units_[unit])) continue;
      expected[unit] = std::max(expected[unit], ++used[unit]);
    }
  };
  if (reached != nullptr) add(*reached);
  for (const auto& forward : forwards_) {
    const auto record = forward.lock();
    if (record && !record->is_done) add(*record);
  }
  for (size_t i = 0; i < units_.size(); ++i) {
    // add_held_gradients() counts as one more accumulation.
    if (expected[i] > 0 && has_held_gradients(units_[i])) ++expected[i];
  }
  return expected;
}

// Whether gradients of earlier backwards wait for the next reduction.
bool SegmentedModel::has_held_gradients(const ShardedUnit& unit) const {
  return reduces(unit) &&
         std::ranges::any_of(unit.flats, [&](const auto& flat) {
           return flat->has_gradients() ||
                  (flat->has_partial_sum() && unit.settings.sums_over_replicas);
         });
}

void SegmentedModel::open_backward(const ForwardRecord* reached) {
  const bool reduces_any = std::ranges::any_of(
      units_, [this](const ShardedUnit& unit) { return reduces(unit); });
  open(reduces_any ? SegmentKind::kBackward : SegmentKind::kLocalBackward,
       reached);
  recorder_.backward_begins();
  const int backward = running_backward_id();
  if (backward >= 0) {
    hidden_hooks_.emplace(hooked_);
    end_with_backward(
        alive_,
        [this, backward] {
          const std::lock_guard lock(mutex_);
          last_backward_ = backward;
          end_backward();
        },
        [this] {
          const std::lock_guard lock(mutex_);
          abandon("its backward raised an exception; see its log");
        });
  }
  for (const Parameter& parameter : parameters_) {
    const UnitParameter& spec = parameter.flat->parameters()[parameter.in_flat];
    const at::Tensor& gradient = spec.tensor.grad();
    TORCH_CHECK(!gradient.defined() || shard_of(gradient) != nullptr,
                "fully_shard: expected a sharded gradient of '", spec.name,
                "' before backward, found an unsharded tensor.\nSet .grad to "
                "None.");
  }
  run_->begin();
  for (size_t i = 0; i < units_.size(); ++i) {
    if (has_held_gradients(units_[i])) run_->add_held_gradients(i);
  }
}

void SegmentedModel::gradient_ready(VariableIndex variable,
                                    const at::Tensor& gradient) {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(!is_in_forward_,
              "fully_shard: expected no gradients of parameters inside "
              "forward(), found one from a backward there.\nCall backward() "
              "after forward(), or use torch::autograd::grad().");
  if (!is_open()) open_backward();
  const size_t number = numbers_of_hooked_[variable.parameter];
  const Parameter& parameter = parameters_[number];
  used_[number] = 1;
  run_->accumulate(parameter.unit, *parameter.flat, parameter.in_flat, gradient,
                   reduces(units_[parameter.unit]));
}

const Shard& SegmentedModel::own_shard_of(const at::Tensor& parameter) const {
  const Shard* const shard = shard_of(parameter);
  TORCH_CHECK_VALUE(shard != nullptr && shard->owner == this,
                    "fully_shard: expected a parameter of this model, found a "
                    "tensor of shape ",
                    parameter.sizes(), ".\nPass the parameter itself.");
  return *shard;
}

at::Tensor SegmentedModel::gradient_slot(const at::Tensor& parameter) {
  const Shard& shard = own_shard_of(parameter);
  const std::lock_guard lock(mutex_);
  if (!is_open() || is_in_forward_ || running_backward_id() < 0 ||
      !accumulates_all_gradients() || !parameter.requires_grad()) {
    return {};
  }
  const Parameter& found = parameters_[shard.number];
  run_->prepare_gradients(found.unit);
  return found.flat->gradient_slot(found.in_flat);
}

void SegmentedModel::add_gradient(const at::Tensor& parameter,
                                  const at::Tensor& gradient) {
  const auto lock = lock_between_segments();
  const Shard& shard = own_shard_of(parameter);
  const Parameter& found = parameters_[shard.number];
  TORCH_CHECK(found.is_trained(), "fully_shard: expected no gradient of '",
              shard.name, "', which is frozen.\nUnfreeze it.");
  TORCH_CHECK(!is_open() && !reduces(units_[found.unit]),
              "fully_shard: expected a sharded gradient of '", shard.name,
              "', found an unsharded tensor, which is accumulated only while "
              "gradients are not synchronized.\nCall backward(), or first "
              "set_requires_gradient_sync(False).");
  TORCH_CHECK_VALUE(gradient.sizes() == parameter.sizes(),
                    "fully_shard: expected a gradient of shape ",
                    parameter.sizes(), " of '", shard.name, "', found ",
                    gradient.sizes(), ".");
  check_usable();
  adopt_pieces();
  release_stale();
  SegmentRun run(parts(), {});
  used_[shard.number] = 1;
  run.accumulate(found.unit, *found.flat, found.in_flat, gradient,
                 /*is_reduced=*/false);
}

void SegmentedModel::end_backward() {
  if (!run_) return;
  recorder_.backward_ends();
  const bool is_reduced = run_->plan().kind == SegmentKind::kBackward;
  std::vector<at::Tensor> hooked;
  run_or_abandon([&] {
    bool has_used_all = true;
    for (size_t i = 0; i < parameters_.size() && is_reduced; ++i) {
      const Parameter& parameter = parameters_[i];
      has_used_all &= used_[i] != 0 || !reduces(units_[parameter.unit]) ||
                      !parameter.is_trained();
    }
    finish(used_, has_used_all);
    hidden_hooks_.reset();
    if (is_reduced) deliver(hooked);
    close();
  });
  last_forward_ = nullptr;
  if (is_reduced) {
    ++statistics_.reduced_backwards;
    recorder_.step_ends();
  }
  if (!hooked.empty()) call_hooks_after_backward(std::move(hooked));
}

void SegmentedModel::deliver(std::vector<at::Tensor>& hooked) {
  const std::vector<char>& used = run_->used_anywhere();
  for (const ShardedUnit& unit : units_) {
    if (std::ranges::any_of(unit.flats, &FlatShard::has_sum)) {
      ++statistics_.reductions;
    }
    for (const auto& flat : unit.flats) {
      if (!flat->has_sum()) continue;
      const size_t first = flat->context().first_number;
      const size_t count = flat->parameters().size();
      if (!unit.sums_over_replicas()) {
        flat->keep_partial_sum();
        continue;
      }
      const auto of_flat = std::span(used).subspan(first, count);
      const bool is_divided =
          unit.transport->scales() || unit.divides_first(*flat);
      flat->deliver(of_flat, is_divided ? 1 : 1 / unit.divisor());
      for (size_t i = 0; i < count; ++i) {
        used_[first + i] = 0;
        const at::Tensor& tensor = flat->parameters()[i].tensor;
        if (of_flat[i] != 0 && has_post_accumulate_hooks(tensor)) {
          hooked.push_back(tensor);
        }
      }
    }
  }
}

}  // namespace brigade
