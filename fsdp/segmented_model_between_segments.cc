// Between forwards and backwards.

#include <ATen/ATen.h>

#include <algorithm>
#include <bit>
#include <exception>
#include <numeric>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "brigade/comm/errors/error_texts.h"
#include "brigade/fsdp/flat_shard.h"
#include "brigade/fsdp/segmented_model.h"
#include "brigade/fsdp/shard_operators.h"

namespace brigade {
namespace {

std::string mebibytes(int64_t bytes) {
  return absl::StrCat(static_cast<double>(bytes * 100 / (1 << 20)) / 100,
                      " MiB");
}

std::string describe(const BufferPlan& plan) {
  return absl::StrJoin(
      plan.num_buffers, " + ", [](std::string* text, const auto& buffers) {
        absl::StrAppend(text, buffers.second, " of ", mebibytes(buffers.first));
      });
}

}  // namespace

std::vector<int64_t> SegmentedModel::ask(const std::string& text,
                                         uint64_t digest, int64_t number) {
  check_usable();
  return with_peers([&] { return exchange_.ask(text, digest, number); });
}

void SegmentedModel::unshard(const std::vector<size_t>& units, bool may_write) {
  const auto lock = enter();
  if (is_open()) {  // a part of the segment
    run_->use(units);
    return;
  }
  prepare();
  std::vector<size_t> missing;
  std::vector<uint64_t> state = {may_write ? 1U : 0U};
  for (const size_t unit : units) {
    state.insert(state.end(), {unit, units_.at(unit).gathered ? 1U : 0U});
    if (!units_[unit].gathered) missing.push_back(unit);
  }
  ask(units.size() == 1
          ? absl::StrCat("unshards unit '", units_[units[0]].name, "'")
          : absl::StrCat("unshards ", units.size(), " units"),
      hash_of(state));
  SegmentRun run(parts(), {});
  run.begin();
  for (const size_t unit : missing) run.all_gather(unit);
  run.throw_noted();
  for (const size_t unit : units) {
    run.wait_for(unit);
    units_[unit].is_by_hand = true;
  }
  may_write_ = may_write;
}

void SegmentedModel::reshard(const std::vector<size_t>& units,
                             bool drops_writes) {
  const std::lock_guard lock(mutex_);
  SegmentRun run(parts(), {});
  std::exception_ptr error;
  for (const size_t number : units) {
    ShardedUnit& unit = units_.at(number);
    const bool was_by_hand = std::exchange(unit.is_by_hand, false);
    if (was_by_hand && may_write_ && !drops_writes) {
      unit.uses->add_current();
      try {
        for (const auto& flat : unit.flats) flat->read_own_slice();
      } catch (...) {
        error = std::current_exception();
      }
      unit.slices.clear();
    }
    if (!is_open()) run.release(number);
  }
  if (error) std::rethrow_exception(error);
}

ShardedModel::Unsharded::Unsharded(ShardedModel& model, bool may_write)
    : model_(model),
      units_(model.unit_names().size()),
      num_exceptions_(std::uncaught_exceptions()) {
  std::iota(units_.begin(), units_.end(), size_t{0});
  model_.unshard(units_, may_write);
}

ShardedModel::Unsharded::~Unsharded() noexcept(false) {
  model_.reshard(units_, std::uncaught_exceptions() > num_exceptions_);
}

std::vector<std::string> SegmentedModel::unit_names() const {
  std::vector<std::string> names;
  for (const ShardedUnit& unit : units_) names.push_back(unit.name);
  return names;
}

ShardingTimeline SegmentedModel::timeline() const {
  const std::lock_guard lock(mutex_);
  return recorder_.timeline(unit_names());
}

void SegmentedModel::set_max_reducing(size_t value) {
  TORCH_CHECK_VALUE(value > 0,
                    "fully_shard: expected 1 reduction at least to hold memory "
                    "at once, found 0.\nGive 2.");
  const std::lock_guard lock(mutex_);
  max_reducing_ = value;
}

void SegmentedModel::set_stall_report_after(std::chrono::milliseconds time) {
  if (stall_watch_ != nullptr) stall_watch_->set_report_after(time);  // peers
}

void SegmentedModel::reduce() {
  const auto lock = enter();
  TORCH_CHECK(!is_open(),
              "fully_shard: reduce() inside of a forward or backward.\nCall it "
              "between them.");
  or_abandon([this] {
    open_backward();
    end_backward();
  });
}

void SegmentedModel::await_statuses() {
  const std::lock_guard lock(mutex_);
  if (is_cpu() || is_open()) return;
  check_usable();
  with_peers([this] { exchange_.confirm(); });
}

void SegmentedModel::meet_peers() {
  const auto lock = enter();
  ask("meets its peers", 0);
}

int64_t SegmentedModel::num_ranks_with(bool has_data) {
  const auto lock = enter();
  return std::ranges::count(ask("counts ranks with data", 0, has_data ? 1 : 0),
                            1);
}

void SegmentedModel::step_without_data() {
  const auto lock = enter();
  SegmentKind kind = SegmentKind::kShadow;
  do {
    open(SegmentKind::kShadow);
    kind = run_->plan().kind;
    or_abandon([&] {
      run_->begin();
      if (kind != SegmentKind::kForward) return end_backward();
      run_->finish({}, /*has_used_all=*/true);
      close();
    });
  } while (kind != SegmentKind::kBackward);
}

double SegmentedModel::clip_grad_norm(double max_norm, double p) {
  TORCH_CHECK_VALUE(p > 0, "clip_grad_norm: expected p > 0, found ", p,
                    ".\nGive 2 for the Euclidean norm, or infinity.");
  const auto lock = enter();
  check_usable();
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> pieces;  // of gradients
  const double own = or_tell_peers([&] {
    std::vector<at::Tensor> norms;
    for (const ShardedUnit& unit : units_) {
      for (const at::Tensor& parameter : unit.parameters) {
        const Shard* const gradient = shard_of(parameter.grad());
        if (gradient == nullptr || gradient->local.numel() == 0) continue;
        pieces.push_back(gradient->local);
        if (unit.is_first_replica) {
          norms.push_back(local_norm(gradient->local, p));
        }
      }
    }
    return norms.empty() ? 0 : local_norm(at::stack(norms), p).item<double>();
  });
  const std::vector<uint64_t> arguments = {std::bit_cast<uint64_t>(max_norm),
                                           std::bit_cast<uint64_t>(p)};
  std::vector<double> by_rank;
  for (const int64_t bits :
       ask(absl::StrCat("clips gradients to ", max_norm), hash_of(arguments),
           std::bit_cast<int64_t>(own))) {
    by_rank.push_back(std::bit_cast<double>(bits));
  }
  const auto norm =
      local_norm(at::tensor(by_rank, at::kDouble), p).item<double>();
  const double factor = max_norm / (norm + 1e-6);
  if (!(factor >= 1) && !pieces.empty()) {  // not a number is handed on
    at::_foreach_mul_(pieces, factor);
  }
  return norm;
}

ShardedModelStatistics SegmentedModel::statistics() const {
  const std::lock_guard lock(mutex_);
  ShardedModelStatistics all = statistics_;
  const ShardTransport::Sent sent = meshes_->sent();
  all.sent_by_gathers = sent.by_gathers;
  all.sent_by_sums = sent.by_sums;
  all.all_gathers = progress_->launched;
  all.buffer_bytes = memory_.total_bytes();
  all.peak_buffer_bytes = memory_.peak_bytes();
  for (const ShardedUnit& unit : units_) {
    for (const auto& flat : unit.flats) {
      const auto size = static_cast<int64_t>(c10::elementSize(flat->dtype()));
      all.shard_bytes += flat->layout().shard_numel() * size;
      all.padding_bytes += flat->layout().padding_numel() * size;
    }
  }
  return all;
}

CheckpointModel checkpoint_model(ShardedModel& of) {
  auto& model = dynamic_cast<SegmentedModel&>(of);
  model.meet_peers();
  std::vector<CheckpointTensor> tensors;
  for (size_t unit = 0; unit < model.units().size(); ++unit) {
    model.written(unit);  // loading writes to the shards themselves
    const std::optional<UnitMesh>& mesh = model.units()[unit].mesh;
    for (const auto& flat : model.units()[unit].flats) {
      for (const UnitParameter& parameter : flat->parameters()) {
        const Shard& shard = *shard_of(parameter.tensor);
        tensors.push_back({.name = parameter.name,
                           .shape = parameter.tensor.sizes().vec(),
                           .strides = parameter.tensor.strides().vec(),
                           .held = shard.local,
                           .begin = shard.offset,
                           .ranks = mesh ? mesh->ranks : std::vector<int>(),
                           .parameter = parameter.tensor,
                           .part_of = [](const at::Tensor& like_parameter) {
                             const Shard* const part = shard_of(like_parameter);
                             TORCH_CHECK_VALUE(
                                 part != nullptr,
                                 "the optimizer has whole state of a sharded "
                                 "parameter.\nMake the optimizer anew.");
                             return part->local;
                           }});
      }
    }
  }
  return {std::move(tensors), model.group()};
}

// As recorded; before that in the order of registration.
PlannedSegment SegmentedModel::planned(SegmentKind kind) const {
  const bool is_forward = kind == SegmentKind::kForward;
  const SegmentRun::Plan plan = {
      .kind = kind,
      .has_grad = true,
      .unsharded = std::vector<char>(units_.size(), 0)};
  PlannedSegment planned = {.rules = rules_for(plan)};
  for (size_t i = 0; i < units_.size(); ++i) {
    planned.stays.push_back(stays_after(plan, i) ? 1 : 0);
  }
  if (const auto known = step_.find(kind); known != step_.end()) {
    planned.schedule = known->second;
    return planned;
  }
  const auto add = [&](ScheduleEntry::Kind entry, size_t unit) {
    planned.schedule.push_back({.kind = entry, .unit = unit});
  };
  for (size_t k = 0; k < units_.size(); ++k) {
    const size_t unit = is_forward ? k : units_.size() - 1 - k;
    const UnitSettings& settings = units_[unit].settings;
    if (is_forward ||
        (settings.reshard_after_forward && settings.gathers_in_backward)) {
      add(ScheduleEntry::Kind::kAllGather, unit);
    }
    if (!is_forward && k > 0)
      add(ScheduleEntry::Kind::kReduceScatter, unit + 1);
  }
  if (!is_forward) add(ScheduleEntry::Kind::kReduceScatter, 0);
  return planned;
}

std::string SegmentedModel::explain() const {
  const std::lock_guard lock(mutex_);
  std::string text =
      absl::StrCat(units_.size(), " units on ", group_->getSize(), " ranks\n");
  for (size_t i = 0; i < units_.size(); ++i) {
    const ShardedUnit& unit = units_[i];
    absl::StrAppend(
        &text, "unit ", i, " '", unit.name, "': ", unit.parameters.size(),
        " parameters, unsharded ", mebibytes(unit.whole_bytes()),
        ", gradients ", mebibytes(unit.gradient_bytes()), ", ",
        unit.settings.reshard_after_forward ? "resharded after forward"
                                            : "kept from forward to backward",
        unit.settings.keeps_slices()
            ? absl::StrCat(", in slices on ", *unit.settings.reshard_to,
                           " ranks in between")
            : "",
        unit.mesh ? absl::StrCat(", over ", describe(*unit.mesh)) : "", "\n");
  }
  std::vector<PlannedSegment> step;
  for (const SegmentKind kind :
       {SegmentKind::kForward, SegmentKind::kBackward}) {
    step.push_back(planned(kind));
    absl::StrAppend(&text,
                    kind == SegmentKind::kForward ? "forward" : "backward",
                    step_.contains(kind) ? ":" : ", not recorded yet:");
    for (const ScheduleEntry& entry : step.back().schedule) {
      absl::StrAppend(&text,
                      entry.kind == ScheduleEntry::Kind::kAllGather
                          ? " gather "
                          : " reduce ",
                      entry.unit);
    }
    absl::StrAppend(&text, "\n");
  }
  std::vector<UnitBytes> bytes;
  for (const ShardedUnit& unit : units_) {
    bytes.push_back(
        {.unsharded = unit.whole_bytes(), .gradients = unit.gradient_bytes()});
  }
  const auto plan_of = [&](size_t num_segments) {
    return plan_buffers(std::span(step).first(num_segments), bytes,
                        max_reducing_);
  };
  const BufferPlan plan = plan_of(2);
  absl::StrAppend(&text, "planned buffers: forward ", describe(plan_of(1)),
                  "; step ", describe(plan), ", at most ",
                  plan.num_for_gradients, " at once for gradients, ",
                  mebibytes(plan.bytes), " in all\n");
  absl::StrAppend(&text, "buffers in use: ", mebibytes(memory_.total_bytes()),
                  ", at most ", mebibytes(memory_.peak_bytes()), "\n");
  return text;
}

}  // namespace brigade
