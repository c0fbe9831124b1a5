// Construction of SegmentedModel, use of parameters, and calls between forwards
// and backwards.

#include "brigade/fsdp/segmented_model.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <bit>
#include <iostream>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "brigade/planning/planners.h"

namespace brigade {
namespace {

std::vector<size_t> all_units(const ShardedModel& model) {
  std::vector<size_t> units(model.unit_names().size());
  std::iota(units.begin(), units.end(), size_t{0});
  return units;
}

std::string describe_bytes(int64_t bytes) {
  const double mebibytes = static_cast<double>(bytes) / (1 << 20);
  return mebibytes < 0.1 ? absl::StrFormat("%.2f KiB", mebibytes * 1024)
                         : absl::StrFormat("%.2f MiB", mebibytes);
}

// "Float", "Float as BFloat16": in memory, and in forward and backward.
std::string describe_dtypes(const ShardedUnit& unit) {
  return absl::StrJoin(
      unit.flats, ", ", [](std::string* text, const auto& flat) {
        const at::ScalarType used = flat->context().compute_dtype;
        absl::StrAppend(text, c10::toString(flat->dtype()));
        if (used == flat->dtype()) return;
        absl::StrAppend(text, " as ", c10::toString(used));
      });
}

std::string describe_after_forward(const ShardedUnit& unit) {
  const UnitSettings& settings = unit.settings;
  return absl::StrCat(
      settings.reshard_after_forward ? "reshard" : "stays unsharded",
      settings.keeps_slices()
          ? absl::StrCat(" to slices over ", *settings.reshard_to, " ranks")
          : "",
      unit.mesh ? absl::StrCat(", over ", describe(*unit.mesh)) : "");
}

// Appends the entries, in lines of at most 80 characters.
void append_schedule(std::string& text, const Schedule& schedule) {
  constexpr size_t kLongest = 80;
  size_t begin = text.rfind('\n') + 1;  // of the line
  const ScheduleEntry* last = nullptr;
  for (const ScheduleEntry& entry : schedule) {
    const bool continues = last != nullptr && last->kind == entry.kind;
    const char* const kind = entry.kind == ScheduleEntry::Kind::kAllGather
                                 ? "all-gather "
                                 : "reduce-scatter ";
    const std::string word = absl::StrCat(continues ? "" : kind, entry.unit);
    if (last != nullptr) text += continues ? "," : ";";
    if (text.size() + word.size() + 2 > begin + kLongest) {
      begin = text.size() + 1;
      text += "\n ";
    }
    absl::StrAppend(&text, " ", word);
    last = &entry;
  }
  text += "\n";
}

size_t count_parameters(const std::vector<ShardedUnit>& units) {
  size_t count = 0;
  for (const ShardedUnit& unit : units) count += unit.parameters.size();
  return count;
}

}  // namespace

SegmentedModel::SegmentedModel(std::vector<ShardedUnit>&& units,
                               c10::intrusive_ptr<c10d::ProcessGroup> group,
                               FullyShardOptions options)
    : ShardedModel(std::move(options)),
      group_(group),
      meshes_(connect_units(units, group, options_, *this)),
      units_(std::move(units)),
      memory_(meshes_->streams().device()),
      exchange_(group, units_.size(), count_parameters(units_), progress_),
      recorder_(meshes_->streams().device()) {
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    for (size_t flat = 0; flat < units_[unit].flats.size(); ++flat) {
      const auto& parameters = units_[unit].flats[flat]->parameters();
      for (size_t i = 0; i < parameters.size(); ++i) {
        parameters_.push_back({.unit = unit,
                               .flat = units_[unit].flats[flat].get(),
                               .in_flat = i});
        const at::Tensor& tensor = parameters[i].tensor;
        if (!tensor.is_floating_point() && !tensor.is_complex()) continue;
        hooked_.push_back(tensor);
        numbers_of_hooked_.push_back(parameters_.size() - 1);
      }
    }
  }
  used_in_forward_.assign(parameters_.size(), 0);
  used_.assign(parameters_.size(), 0);
  make_hooks();
  stall_watch_ =
      StallWatch::start(group_, exchange_.channel().store_prefix(),
                        {.engine = "fully_shard",
                         .unit = "all-gather",
                         .without_data = "step_without_data()"},
                        progress_, [this] { return describe_progress(); });
}

SegmentedModel::~SegmentedModel() {
  alive_.reset();
  if (run_) abandon("the sharded model was destroyed");
  try {
    // A forked child has the parent's statuses.
    if (!is_broken_ && exchange_.channel().is_usable_here())
      exchange_.confirm();
  } catch (...) {
    std::cerr << "fully_shard: a failure became known when the sharded model "
                 "was destroyed: "
              << message_of(std::current_exception())
              << "\nThe parameters may be those of a failed step: load a "
                 "checkpoint."
              << std::endl;
    close_groups();
  }
  stall_watch_.reset();
  hooks_.reset();
  run_.reset();
  if (is_broken_) return;  // collectives may still write to the memory
  SegmentRun run(parts(), {});
  for (size_t i = 0; i < units_.size(); ++i) {
    units_[i].is_by_hand = false;
    run.release(i);
    memory_.release(std::exchange(units_[i].kept, {}));
  }
  run.drop_gradients();
}

std::string SegmentedModel::describe_progress() const {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  const std::string place = describe_iteration(progress_->iteration);
  if (lock.owns_lock() && !is_open()) {
    return absl::StrCat("has begun no forward or backward since ", place);
  }
  return absl::StrCat("is in ", place, " (", progress_->launched.load(),
                      " all-gathers launched)");
}

// ---- Parameters.

void SegmentedModel::make_hooks() {
  hooks_.reset();
  std::vector<char> was_trained;
  for (const at::Tensor& parameter : hooked_) {
    was_trained.push_back(parameter.requires_grad() ? 1 : 0);
    parameter.set_requires_grad(true);
  }
  show_compute_dtypes(true);  // AccumulateGrad nodes keep this dtype
  const std::vector<std::vector<at::Tensor>> replicas = {hooked_};
  hooks_ = std::make_unique<GradientHooks>(
      replicas, [](VariableIndex, bool) {},
      [this](VariableIndex variable, const at::Tensor& gradient) {
        gradient_ready(variable, gradient);
      });
  show_compute_dtypes(false);
  for (size_t i = 0; i < hooked_.size(); ++i) {
    hooked_[i].set_requires_grad(was_trained[i] != 0);
  }
}

void SegmentedModel::show_compute_dtypes(bool value) {
  for (const ShardedUnit& unit : units_) {
    for (const auto& flat : unit.flats) flat->show_compute_dtype(value);
  }
}

void SegmentedModel::adopt_pieces() {
  bool is_converted = false;
  std::exception_ptr error;
  for (ShardedUnit& unit : units_) {
    for (const auto& flat : unit.flats) {
      try {
        if (!flat->adopt_pieces()) continue;
      } catch (...) {
        error = std::current_exception();
        continue;
      }
      is_converted = true;
      written(static_cast<size_t>(&unit - units_.data()));
    }
  }
  const std::vector<std::vector<at::Tensor>> replicas = {hooked_};
  if (is_converted || (!error && hooks_->first_detached(replicas))) {
    make_hooks();
  }
  if (error) std::rethrow_exception(error);
}

void SegmentedModel::check_reshard_sizes() const {
  for (const ShardedUnit& unit : units_) {
    const std::optional<int>& found = unit.settings.reshard_to;
    const std::set<int>& known = meshes_->of(unit.mesh_number).gather_sizes;
    TORCH_CHECK(!found || known.contains(*found),
                "fully_shard: ", describe_unit(unit.name),
                ": expected reshard_after_forward to be one of [",
                absl::StrJoin(known, ", "),
                "], the sizes in use when the model was created, found ",
                *found, ".\nSet ", *found,
                " on one unit before the first forward.");
  }
}

// Precedes each collective call. An error on one rank is thrown on all ranks.
void SegmentedModel::prepare() {
  check_usable();
  run_or_fail_on_peers([this] {
    check_reshard_sizes();
    adopt_pieces();
  });
  release_stale();
}

void SegmentedModel::written(size_t unit) {
  const std::lock_guard lock(mutex_);
  units_[unit].is_stale = true;
  units_[unit].slices.clear();
}

// Releases unsharded units whose shards were written since.
void SegmentedModel::release_stale() {
  if (std::ranges::none_of(units_, &ShardedUnit::is_stale)) return;
  SegmentRun run(parts(), {});
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    if (units_[unit].is_stale) run.release(unit);
  }
}

ParameterState SegmentedModel::use(std::span<const Shard* const> parameters) {
  const std::lock_guard lock(mutex_);
  const int backward = running_backward_id();
  if (!is_open() && backward >= 0 && backward != last_backward_) {
    open_backward();
  }
  const bool is_inside =
      is_open() && (backward >= 0 || (is_in_forward_ && is_forward_thread()));
  if (!is_inside) {
    ParameterState state = ParameterState::kWritable;
    for (const Shard* const shard : parameters) {
      ShardedUnit& unit = units_[shard->unit];
      if (!unit.is_by_hand) return ParameterState::kSharded;
      if (!unit.may_write) state = ParameterState::kUnsharded;
      if (!unit.uses->add_current()) continue;
      for (const auto& future : unit.gathered->futures) future->wait();
    }
    return state;
  }
  c10::SmallVector<size_t, 4> units;
  for (const Shard* const shard : parameters) {
    if (is_in_forward_) used_in_forward_[shard->number] = 1;
    if (std::find(units.begin(), units.end(), shard->unit) == units.end()) {
      units.push_back(shard->unit);
    }
  }
  run_->use(units);
  return ParameterState::kUnsharded;
}

bool SegmentedModel::use_after_forward(
    std::span<const Shard* const> parameters) {
  const std::lock_guard lock(mutex_);
  if (is_open() || !last_forward_ || last_forward_->is_done ||
      !std::ranges::all_of(parameters, [&](const Shard* shard) {
        const ShardedUnit& unit = units_[shard->unit];
        return unit.gathered && !unit.is_stale;
      })) {
    return false;
  }
  SegmentRun run(parts(), {});
  for (const Shard* const shard : parameters) {
    run.wait_for(shard->unit);
    const bool is_trained = parameters_[shard->number].is_trained();
    last_forward_->used[shard->number] = is_trained ? 1 : 0;
  }
  return true;
}

void SegmentedModel::end_use_after_forward(size_t unit) {
  const std::lock_guard lock(mutex_);
  if (!is_open() && !units_[unit].is_by_hand) units_[unit].unbind();
}

bool SegmentedModel::is_forward_thread() const {
  return std::this_thread::get_id() == forward_thread_;
}

// ---- Calls between forwards and backwards.

void SegmentedModel::check_usable() const {
  TORCH_CHECK(!is_broken_,
              "fully_shard: this model can't continue: ", broken_reason_,
              "\nCreate a new process group and model, and load a checkpoint.");
}

// Autograd destroys a failed backward shortly after its caller gets the error;
// waits for that.
std::unique_lock<std::recursive_mutex> SegmentedModel::lock_between_segments()
    const {
  std::unique_lock lock(mutex_);
  if (running_backward_id() < 0) {
    run_ended_.wait_for(lock, std::chrono::seconds(1),
                        [this] { return !is_open() || is_in_forward_; });
  }
  return lock;
}

bool SegmentedModel::can_continue() const {
  const auto lock = lock_between_segments();
  return !is_broken_;
}

std::vector<int64_t> SegmentedModel::compare(const std::string& text,
                                             uint64_t hash, int64_t number) {
  check_usable();
  return run_exchange([&] { return exchange_.compare(text, hash, number); });
}

std::vector<size_t> SegmentedModel::unshard(const std::vector<size_t>& units,
                                            bool may_write) {
  const auto lock = lock_between_segments();
  require_units(units);
  if (is_open()) {
    run_->use(units);
    return {};
  }
  prepare();
  std::vector<size_t> missing;
  std::vector<size_t> begun;
  std::vector<uint64_t> state = {may_write ? 1U : 0U};
  const ShardedUnit* read_only = nullptr;
  for (const size_t number : units) {
    const ShardedUnit& unit = units_[number];
    state.insert(state.end(),
                 {number, unit.gathered ? 1U : 0U, unit.is_by_hand ? 1U : 0U});
    if (!unit.gathered) missing.push_back(number);
    if (!unit.is_by_hand) {
      begun.push_back(number);
    } else if (may_write && !unit.may_write) {
      read_only = &unit;
    }
  }
  compare(units.size() == 1
              ? absl::StrCat("unshards ", describe_unit(units_[units[0]].name))
              : absl::StrCat("unshards ", units.size(), " units"),
          hash_of(state));
  TORCH_CHECK(read_only == nullptr, "fully_shard: expected ",
              describe_unit(read_only->name),
              " unsharded with writes, found it unsharded without.\nBegin the "
              "outer scope with may_write (Python: writes=True).");
  SegmentRun run(parts(), {});
  run.begin();
  for (const size_t unit : missing) run.all_gather(unit);
  run.throw_recorded_error();
  for (const size_t unit : begun) {
    run.wait_for(unit);
    units_[unit].is_by_hand = true;
    units_[unit].may_write = may_write;
  }
  return begun;
}

void SegmentedModel::require_units(const std::vector<size_t>& units) const {
  for (const size_t unit : units) {
    TORCH_CHECK_VALUE(unit < units_.size(),
                      "fully_shard: expected a unit below ", units_.size(),
                      ", found ", unit, ".\nGive indices into unit_names().");
  }
}

void SegmentedModel::reshard(const std::vector<size_t>& units,
                             bool drop_writes) {
  const std::lock_guard lock(mutex_);
  require_units(units);
  SegmentRun run(parts(), {});
  std::exception_ptr error;
  for (const size_t number : units) {
    ShardedUnit& unit = units_[number];
    const bool was_by_hand = std::exchange(unit.is_by_hand, false);
    if (was_by_hand && unit.may_write && !drop_writes) {
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
      units_(model.unshard(all_units(model), may_write)),
      num_exceptions_(std::uncaught_exceptions()) {}

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
                    "fully_shard: expected max_reducing >= 1, found 0.\nGive "
                    "2, the default.");
  const std::lock_guard lock(mutex_);
  max_reducing_ = value;
}

void SegmentedModel::set_stall_report_after(std::chrono::milliseconds time) {
  if (stall_watch_ != nullptr) stall_watch_->set_report_after(time);
}

void SegmentedModel::reduce() {
  const auto lock = lock_between_segments();
  TORCH_CHECK(!is_open(),
              "fully_shard: expected reduce() between forwards and backwards, "
              "found it inside one.\nCall it after backward.");
  run_or_abandon([this] {
    open_backward();
    end_backward();
  });
}

void SegmentedModel::await_statuses() {
  const std::lock_guard lock(mutex_);
  if (is_cpu() || is_open()) return;
  check_usable();
  run_exchange([this] { exchange_.confirm(); });
}

void SegmentedModel::barrier() {
  const auto lock = lock_between_segments();
  compare("waits at a barrier", 0);
}

int64_t SegmentedModel::num_ranks_with(bool has_data) {
  const auto lock = lock_between_segments();
  return std::ranges::count(
      compare("counts ranks with data", 0, has_data ? 1 : 0), 1);
}

void SegmentedModel::step_without_data() {
  const auto lock = lock_between_segments();
  SegmentKind kind = SegmentKind::kWithoutData;
  do {
    open(SegmentKind::kWithoutData);
    kind = run_->plan().kind;
    run_or_abandon([&] {
      run_->begin();
      if (kind != SegmentKind::kForward) return end_backward();
      finish({}, /*has_used_all=*/true);
      close();
    });
  } while (kind != SegmentKind::kBackward);
}

double SegmentedModel::clip_grad_norm(double max_norm, double p) {
  TORCH_CHECK_VALUE(p > 0, "clip_grad_norm: expected p > 0, found ", p,
                    ".\nGive 2 for the Euclidean norm, or infinity.");
  const auto lock = lock_between_segments();
  check_usable();
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> pieces;  // of gradients
  const double own = run_or_fail_on_peers([&] {
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
       compare(absl::StrCat("clips gradients to ", max_norm),
               hash_of(arguments), std::bit_cast<int64_t>(own))) {
    by_rank.push_back(std::bit_cast<double>(bits));
  }
  const auto norm =
      local_norm(at::tensor(by_rank, at::kDouble), p).item<double>();
  const double factor = max_norm / (norm + 1e-6);
  if (!(factor >= 1) && !pieces.empty()) {  // NaN spreads to the gradients
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
      all.shard_bytes += flat->shard_bytes();
      all.padding_bytes +=
          flat->layout().padding_numel() *
          static_cast<int64_t>(c10::elementSize(flat->dtype()));
    }
  }
  return all;
}

std::vector<size_t> SegmentedModel::units_to_keep(int64_t max_bytes) {
  const auto lock = lock_between_segments();
  const ShardingTimeline timeline = this->timeline();
  std::vector<int64_t> gather_ns(units_.size(), 0);
  int64_t previous_ns = 0;  // one all-gather at a time
  for (const GatherTimes& gather : timeline.gathers) {
    const int64_t begin_ns = std::max(gather.launch_ns, previous_ns);
    previous_ns = std::max(previous_ns, gather.complete_ns);
    if (gather.pass != GatheredIn::kBackward) continue;
    for (size_t i = 0; i < units_.size(); ++i) {
      if (units_[i].name == gather.unit) gather_ns[i] += previous_ns - begin_ns;
    }
  }
  const std::string action =
      absl::StrCat("plans units to keep in ", max_bytes, " bytes");
  const auto hash = static_cast<uint64_t>(max_bytes);
  const auto steps = compare(action, hash, timeline.iteration);
  TORCH_CHECK(std::ranges::min(steps) > 0,
              "fully_shard: units to keep are chosen by the times of a sampled "
              "step, and a rank has sampled none.\nRun a step first, and keep "
              "the timeline's sample rate above 0.");
  std::vector<double> bytes;
  std::vector<double> gather_s;
  for (size_t i = 0; i < units_.size(); ++i) {
    bytes.push_back(static_cast<double>(units_[i].whole_bytes()));
    const auto by_rank = compare(action, hash, gather_ns[i]);
    gather_s.push_back(1e-9 * static_cast<double>(std::ranges::max(by_rank)));
  }
  const std::vector<char> kept =
      brigade::units_to_keep(bytes, gather_s, static_cast<double>(max_bytes));
  std::vector<size_t> chosen;
  for (size_t unit = 0; unit < kept.size(); ++unit) {
    if (kept[unit] != 0) chosen.push_back(unit);
  }
  return chosen;
}

std::vector<size_t> units_to_keep(ShardedModel& model, int64_t max_bytes) {
  return dynamic_cast<SegmentedModel&>(model).units_to_keep(max_bytes);
}

CheckpointModel checkpoint_model(ShardedModel& of) {
  auto& model = dynamic_cast<SegmentedModel&>(of);
  model.barrier();
  TORCH_CHECK(
      std::ranges::none_of(model.units(), &ShardedUnit::is_by_hand),
      "fully_shard: expected a checkpoint of sharded parameters, found them "
      "unsharded.\nEnd unsharded() (Python: whole_parameters()) or unshard() "
      "first.");
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
                                 "expected sharded optimizer state for a "
                                 "sharded parameter, found an unsharded "
                                 "tensor.\nCreate the optimizer after "
                                 "fully_shard().");
                             return part->local;
                           }});
      }
    }
  }
  return {std::move(tensors), model.group()};
}

// Returns the last recorded schedule; before the first one, a schedule in the
// order of registration.
PlannedSegment SegmentedModel::planned_segment(SegmentKind kind) const {
  const bool is_forward = kind == SegmentKind::kForward;
  const SegmentRun::Plan plan = {
      .kind = kind,
      .has_grad = true,
      .unsharded = std::vector<char>(units_.size(), 0)};
  PlannedSegment planned = {.rules = rules_for(plan)};
  for (size_t i = 0; i < units_.size(); ++i) {
    planned.stays.push_back(stays_unsharded_after(plan, i) ? 1 : 0);
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
  size_t width = 6;
  for (const ShardedUnit& unit : units_) {
    width = std::max(width, unit.name.size());
  }
  constexpr char kRow[] = "%4s  %-*s%12s%12s%12s%12s  %-8s  %s\n";
  std::string text = absl::StrCat("units: ", units_.size(),
                                  ", ranks: ", group_->getSize(), "\n");
  absl::StrAppendFormat(&text, kRow, "unit", width, "name", "parameters",
                        "shard", "unsharded", "gradients", "dtype",
                        "after forward");
  std::vector<UnitBytes> bytes;
  for (const ShardedUnit& unit : units_) {
    int64_t shard = 0;
    for (const auto& flat : unit.flats) shard += flat->shard_bytes();
    absl::StrAppendFormat(&text, kRow, absl::StrCat(bytes.size()), width,
                          unit.name.empty() ? "(root)" : unit.name,
                          absl::StrCat(unit.parameters.size()),
                          describe_bytes(shard),
                          describe_bytes(unit.whole_bytes()),
                          describe_bytes(unit.gradient_bytes()),
                          describe_dtypes(unit), describe_after_forward(unit));
    bytes.push_back(
        {.unsharded = unit.whole_bytes(), .gradients = unit.gradient_bytes()});
  }
  std::vector<PlannedSegment> step;
  for (const SegmentKind kind :
       {SegmentKind::kForward, SegmentKind::kBackward}) {
    step.push_back(planned_segment(kind));
    absl::StrAppend(
        &text, kind == SegmentKind::kForward ? "forward" : "backward",
        step_.contains(kind) ? ":"
                             : " (expected; recorded in the first step):");
    append_schedule(text, step.back().schedule);
  }
  const BufferPlan plan = plan_buffers(step, bytes, max_reducing_);
  const auto append_buffers = [](std::string* to, const auto& buffers) {
    absl::StrAppend(to, buffers.second, " of ", describe_bytes(buffers.first));
  };
  absl::StrAppend(&text, "unsharded buffers: planned ",
                  absl::StrJoin(plan.num_buffers, " + ", append_buffers), " = ",
                  describe_bytes(plan.bytes), " (at most ",
                  plan.num_for_gradients,
                  " at once for gradients),\n  allocated now ",
                  describe_bytes(memory_.total_bytes()), ", peak ",
                  describe_bytes(memory_.peak_bytes()), "\n");
  return text;
}

}  // namespace brigade
