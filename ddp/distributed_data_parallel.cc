#include "brigade/ddp/distributed_data_parallel.h"

#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <exception>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "brigade/comm/agreement.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/group/group_info.h"
#include "brigade/comm/ordered/host_sums.h"
#include "brigade/comm_hooks/hook_traits.h"
#include "brigade/ddp/module_tensors.h"
#include "brigade/hooks/parameter_casts.h"
#include "brigade/reducer/auto_plan.h"

namespace brigade {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Options = DistributedDataParallelOptions;

std::vector<NamedTensor> without(std::vector<NamedTensor> tensors,
                                 const std::vector<std::string>& ignored) {
  std::erase_if(tensors, [&](const NamedTensor& entry) {
    return std::ranges::find(ignored, entry.name) != ignored.end();
  });
  return tensors;
}

std::vector<at::Tensor> values_of(std::span<const NamedTensor> named) {
  std::vector<at::Tensor> tensors;
  tensors.reserve(named.size());
  for (const NamedTensor& entry : named) tensors.push_back(entry.tensor);
  return tensors;
}

// Returns the dtype of gradients in all-reduces; nullopt if it is their own, or
// if the user's comm hook chooses it.
std::optional<at::ScalarType> reduction_dtype(const Options& options) {
  const std::optional<MixedPrecision>& precision = options.mixed_precision;
  if (!precision || options.reducer.comm_hook) return std::nullopt;
  return precision->reduction.value_or(precision->parameters);
}

std::string name_of(std::optional<at::ScalarType> dtype) {
  return dtype ? c10::toString(*dtype) : "unset";
}

absl::Status check_precision(const Options& options) {
  const std::optional<MixedPrecision>& precision = options.mixed_precision;
  if (!precision) return absl::OkStatus();
  constexpr std::array kAllowed = {at::kBFloat16, at::kHalf, at::kFloat,
                                   at::kDouble};
  for (const at::ScalarType dtype :
       {precision->parameters,
        precision->reduction.value_or(precision->parameters),
        precision->buffers.value_or(precision->parameters)}) {
    if (std::ranges::find(kAllowed, dtype) == kAllowed.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("mixed_precision: dtypes must be BFloat16, Half, Float "
                       "or Double, got ",
                       c10::toString(dtype)));
    }
  }
  if (precision->reduction && options.reducer.comm_hook) {
    return absl::InvalidArgumentError(
        "mixed_precision.reduction must be unset with a comm hook, which "
        "chooses the dtype itself; remove one of them");
  }
  return absl::OkStatus();
}

absl::Status check_plan(const Options& options) {
  if (!options.auto_plan.value_or(false) ||
      options.reducer.bucket_plan.empty()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      "auto_plan and bucket_plan exclude each other; set one of them");
}

bool sets_buckets(const ReducerOptions& options) {
  return !options.bucket_plan.empty() ||
         options.bucket_cap_bytes != ReducerOptions().bucket_cap_bytes;
}

absl::Status check_ignored(const ModuleTensors& module,
                           std::vector<std::string> ignored) {
  for (const auto& tensors : {module.parameters, module.buffers}) {
    for (const NamedTensor& entry : tensors) std::erase(ignored, entry.name);
  }
  if (ignored.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "ignored: module ", module.module_name, " has no '",
      absl::StrJoin(ignored, "', '"),
      "'; use the names of named_parameters() and named_buffers()"));
}

// Describes the options that must be identical on all ranks.
std::vector<std::string> describe_options(const Options& options) {
  std::vector<std::string> items = {
      absl::StrCat("broadcast_buffers: ",
                   options.broadcast_buffers ? "true" : "false"),
      absl::StrCat("auto_plan: ", !options.auto_plan   ? "unset"
                                  : *options.auto_plan ? "true"
                                                       : "false")};
  if (const auto& precision = options.mixed_precision) {
    items.push_back(
        absl::StrCat("mixed_precision: ", c10::toString(precision->parameters),
                     ", reduction ", name_of(precision->reduction),
                     ", buffers ", name_of(precision->buffers)));
  }
  return items;
}

// Collective: compares the module and options across ranks. Returns the tensors
// that are not ignored.
ModuleTensors verified_tensors(const AnyModule& module, const Options& options,
                               const Group& group) {
  ModuleTensors tensors = tensors_of_module(module);
  absl::Status status = check_ignored(tensors, options.ignored);
  status.Update(check_precision(options));
  status.Update(check_plan(options));
  tensors.parameters = without(std::move(tensors.parameters), options.ignored);
  tensors.buffers = without(std::move(tensors.buffers), options.ignored);
  verify_module(tensors, group, status);
  require_agreement(group, "DistributedDataParallel: option",
                    describe_options(options), absl::OkStatus());
  return tensors;
}

// Ranks with data in each iteration of join(), counted by an all-reduce of 4
// bytes per rank.
//
// Thread safety: one call at a time.
class JoinSession {
 public:
  explicit JoinSession(Group group) : group_(std::move(group)) {}

  // Collective: this rank has data for the next iteration. Does not wait.
  void begin_iteration() { count(/*has_data=*/true); }

  // Collective: this rank has run out of data. Returns whether another rank has
  // data, so that this rank must shadow the iteration. Errors: PeerError.
  bool begin_shadow() {
    count(/*has_data=*/false);
    return !ranks_with_data().empty();
  }

  // Returns the current iteration's ranks, ascending. The first call waits for
  // the count.
  const std::vector<int>& ranks_with_data();

  // Returns the lowest of the ranks that had data last; -1 if none ever had.
  int last_rank_with_data() {
    ranks_with_data();
    return last_rank_with_data_;
  }

 private:
  struct Count {
    at::Tensor counts;  // int32, [world_size], on the group's device
    c10::intrusive_ptr<c10d::Work> work = nullptr;
  };

  void count(bool has_data);
  std::vector<int> read(const Count& count) const;

  const Group group_;
  int64_t iteration_ = 0;
  Count current_;
  Count previous_;
  bool is_read_ = false;  // whether with_data_ holds current_'s ranks
  std::vector<int> with_data_;
  int last_rank_with_data_ = -1;
};

void JoinSession::count(bool has_data) {
  const at::NoGradGuard no_grad;
  at::Tensor mine = at::zeros({group_->getSize()}, at::kInt);
  if (has_data) mine[group_->getRank()] = 1;
  std::vector<at::Tensor> tensors = {mine.to(control_device(*group_))};
  ++iteration_;
  is_read_ = false;
  previous_ = std::exchange(current_, {.counts = tensors.front(),
                                       .work = group_->allreduce(tensors)});
}

const std::vector<int>& JoinSession::ranks_with_data() {
  TORCH_CHECK(iteration_ > 0,
              "join: a model was used before the first model of the list.\nUse "
              "the models in the list's order.");
  if (std::exchange(is_read_, true)) return with_data_;
  with_data_ = read(current_);
  const std::vector<int> had_data =
      with_data_.empty() && previous_.work ? read(previous_) : with_data_;
  if (!had_data.empty()) last_rank_with_data_ = had_data.front();
  return with_data_;
}

std::vector<int> JoinSession::read(const Count& count) const {
  try {
    count.work->wait();
  } catch (...) {
    throw_peer_error(absl::StrCat("join: counting the ranks with data in "
                                  "iteration ",
                                  iteration_, " on rank ", group_->getRank()),
                     std::current_exception());
  }
  const at::Tensor counts = count.counts.cpu();
  std::vector<int> ranks;
  for (int rank = 0; rank < group_->getSize(); ++rank) {
    if (counts.const_data_ptr<int32_t>()[rank] != 0) ranks.push_back(rank);
  }
  return ranks;
}

}  // namespace

class ReplicatedModule::State {
 public:
  State(AnyModule module, Group group, Options options);

  void run(c10::function_ref<std::vector<at::Tensor>()> forward);
  void sync_buffers();

  // ---- For join(). `is_first`: the model begins the session's iterations.
  void enter(JoinSession& session, JoinDivisor divisor, bool is_first);
  void leave() noexcept;

  // Collective. Begins each iteration: inside join(), a barrier detects ranks
  // that an exception has taken out of step.
  void begin_iteration();

  // Collective: launches the rest of the peers' iteration on zeros.
  void shadow();

  // Collective: broadcasts the parameters and buffers of `rank`.
  void copy_from(int rank);

  Options options_;  // `reducer` is reset once the reducer exists
  const Group group_;
  bool requires_gradient_sync_ = true;
  std::unique_ptr<Reducer> reducer_;

 private:
  void before_forward();
  std::vector<NamedTensor> buffers() const;
  bool should_broadcast_buffers() const;
  void broadcast_buffers();
  std::vector<at::Tensor> in_low_precision(
      c10::function_ref<std::vector<at::Tensor>()> forward) const;
  void apply_divisor();

  const AnyModule module_;
  const ModuleTensors tensors_;  // without ignored ones
  ModuleWatch watch_;
  std::shared_ptr<AveragingHook> averaging_;  // null: the hook is the user's

  JoinSession* session_ = nullptr;  // null outside of join()
  JoinDivisor divisor_ = JoinDivisor::kWorldSize;
  bool is_first_ = false;  // in the session
};

ReplicatedModule::State::State(AnyModule module, Group group, Options options)
    : options_(std::move(options)),
      group_(std::move(group)),
      module_(std::move(module)),
      tensors_(verified_tensors(module_, options_, group_)),
      watch_(module_, tensors_, options_.ignored) {
  std::vector<NamedTensor> reduced = tensors_.parameters;
  std::erase_if(reduced, [](const NamedTensor& parameter) {
    return !parameter.tensor.requires_grad();
  });
  ReducerOptions chosen = options_.reducer;
  std::shared_ptr<OrderedAllReduce> ordered;
  if (!chosen.comm_hook) {
    if (chosen.reproducible) {
      ordered = std::make_shared<OrderedAllReduce>(group_);
    }
    averaging_ = default_hook(group_, reduction_dtype(options_), ordered);
    chosen.comm_hook = averaging_;
  }
  if (chosen.parameter_names.empty()) {
    for (const NamedTensor& parameter : reduced) {
      chosen.parameter_names.push_back(parameter.name);
    }
  }
  const bool connects = ordered && chosen.verify_across_ranks;
  const std::vector<bool> sparse = chosen.expect_sparse_gradients;
  reducer_ =
      std::make_unique<Reducer>(values_of(reduced), group_, std::move(chosen));
  reducer_->expect_forwards();
  if (connects) ordered->connect_for(values_of(reduced));
  const bool has_fixed_bits =
      averaging_ &&
      (ordered || group_->getSize() == 2 ||
       (averaging_->host_sums() &&
        std::ranges::all_of(reduced, [](const NamedTensor& parameter) {
          return HostSums::can_reduce(parameter.tensor.detach());
        })));
  if (group_->getSize() > 1 &&
      options_.auto_plan.value_or(has_fixed_bits &&
                                  !sets_buckets(options_.reducer) &&
                                  reducer_->plan().num_buckets() > 1)) {
    AutoPlan::attach(*reducer_, values_of(reduced), sparse, group_);
  }
  if (const auto& precision = options_.mixed_precision;
      precision && precision->buffers) {
    for (const auto& [name, buffer] : buffers()) {
      if (!buffer.is_floating_point()) continue;
      buffer.set_data(buffer.to(*precision->buffers));
    }
  }
  options_.reducer = {};  // its comm hook may own a group
  copy_from(0);
}

// ---- A forward.

void ReplicatedModule::State::before_forward() {
  // A failed step must not be evaluated.
  if (!at::GradMode::is_enabled()) return reducer_->await_statuses();
  if (!requires_gradient_sync_) return;
  watch_.check();
  reducer_->forward_begins();
  begin_iteration();
  if (session_ != nullptr) {
    if (is_first_) session_->begin_iteration();
    apply_divisor();
  }
  if (!should_broadcast_buffers()) return;
  if (session_ != nullptr) return broadcast_buffers();
  reducer_->broadcast_before_forward(values_of(buffers()), /*source=*/0);
}

void ReplicatedModule::State::run(
    c10::function_ref<std::vector<at::Tensor>()> forward) {
  before_forward();
  const std::vector<at::Tensor> outputs =
      options_.mixed_precision ? in_low_precision(forward) : forward();
  if (!at::GradMode::is_enabled()) return;
  if (!requires_gradient_sync_) return reducer_->note_local_forward(outputs);
  reducer_->prepare_for_backward(outputs);
}

// Refuses checkpoints where other threads use parameters during backward: with
// parameters on several devices, and with optimizer steps in backward.
std::vector<at::Tensor> ReplicatedModule::State::in_low_precision(
    c10::function_ref<std::vector<at::Tensor>()> forward) const {
  const std::vector<at::Tensor> parameters = values_of(tensors_.parameters);
  const bool spans_devices =
      std::ranges::any_of(parameters, [&](const at::Tensor& parameter) {
        return parameter.device() != parameters.front().device();
      });
  const ParameterCasts::Scope scope(std::make_shared<ParameterCasts>(
      parameters, options_.mixed_precision->parameters,
      spans_devices || reducer_->hook_steps_parameters()
          ? ParameterCasts::Checkpoints::kRefused
          : ParameterCasts::Checkpoints::kAllowed));
  std::vector<at::Tensor> outputs = forward();
  const std::optional<size_t> changed = scope.first_changed();
  TORCH_CHECK(!changed, "mixed_precision: parameter ",
              tensors_.parameters[changed.value_or(0)].name,
              " was written, frozen or unfrozen in forward, where it holds a "
              "temporary copy in ",
              options_.mixed_precision->parameters,
              ".\nChange parameters outside of forward.");
  return outputs;
}

// ---- Buffers.

std::vector<NamedTensor> ReplicatedModule::State::buffers() const {
  if (!std::holds_alternative<torch::jit::Module>(module_)) {
    return tensors_.buffers;
  }
  return without(tensors_of_module(module_).buffers, options_.ignored);
}

bool ReplicatedModule::State::should_broadcast_buffers() const {
  return options_.broadcast_buffers && !buffers().empty();
}

void ReplicatedModule::State::sync_buffers() {
  if (buffers().empty()) return;
  // An exception in a forward or loss may have stopped a single rank.
  reducer_->barrier("called sync_buffers()");
  broadcast_buffers();
}

void ReplicatedModule::State::broadcast_buffers() {
  try {
    broadcast_from(
        session_ == nullptr ? 0 : session_->ranks_with_data().front(),
        buffers(), "buffers", group_);
  } catch (const c10::DistBackendError&) {
    reducer_->abort_group();
    throw;
  }
}

// ---- Uneven inputs.

void ReplicatedModule::State::enter(JoinSession& session, JoinDivisor divisor,
                                    bool is_first) {
  TORCH_CHECK(session_ == nullptr,
              "join: a model is inside another join() already.\nRun its loop "
              "without the inner join().");
  TORCH_CHECK_VALUE(
      reducer_->comm_hook() == averaging_ || divisor == JoinDivisor::kWorldSize,
      "join: expected the divisor kWorldSize, since the user's comm hook "
      "divides gradients itself; got kRanksWithData.\nRemove the comm hook or "
      "the divisor.");
  session_ = &session;
  divisor_ = divisor;
  is_first_ = is_first;
}

void ReplicatedModule::State::leave() noexcept {
  session_ = nullptr;
  if (averaging_) averaging_->divide_by_world_size();
}

void ReplicatedModule::State::apply_divisor() {
  if (divisor_ != JoinDivisor::kRanksWithData) return;
  averaging_->divide_by([session = session_] {
    return static_cast<double>(session->ranks_with_data().size());
  });
}

void ReplicatedModule::State::begin_iteration() {
  // First of all, since later calls may throw on a single rank.
  reducer_->rebuild_buckets();
  if (session_ != nullptr) reducer_->barrier("came to a forward");
}

void ReplicatedModule::State::shadow() {
  if (should_broadcast_buffers()) broadcast_buffers();
  apply_divisor();
  reducer_->shadow_iteration();
}

void ReplicatedModule::State::copy_from(int rank) {
  broadcast_from(rank, tensors_.parameters, "parameters", group_);
  broadcast_from(rank, buffers(), "buffers", group_);
}

// ---- ReplicatedModule.

ReplicatedModule::ReplicatedModule(
    std::shared_ptr<const torch::nn::Module> module, Group group,
    Options options)
    : state_(std::make_unique<State>(std::move(module), std::move(group),
                                     std::move(options))) {}

ReplicatedModule::ReplicatedModule(torch::jit::Module module, Group group,
                                   Options options)
    : state_(std::make_unique<State>(std::move(module), std::move(group),
                                     std::move(options))) {}

ReplicatedModule::~ReplicatedModule() = default;

void ReplicatedModule::run_forward(
    c10::function_ref<std::vector<at::Tensor>()> forward) {
  state_->run(forward);
}

std::optional<at::ScalarType> ReplicatedModule::forward_dtype() const {
  const auto& precision = state_->options_.mixed_precision;
  return precision ? std::optional(precision->parameters) : std::nullopt;
}

bool ReplicatedModule::requires_gradient_sync() const {
  return state_->requires_gradient_sync_;
}

void ReplicatedModule::set_requires_gradient_sync(bool value) {
  state_->requires_gradient_sync_ = value;
}

void ReplicatedModule::sync_buffers() { state_->sync_buffers(); }

Reducer& ReplicatedModule::reducer() { return *state_->reducer_; }

void join(std::span<ReplicatedModule* const> models,
          const std::function<void()>& loop, JoinDivisor divisor) {
  TORCH_CHECK_VALUE(!models.empty(),
                    "join: expected at least 1 model, got 0.\nPass the "
                    "DistributedDataParallel that the loop trains.");
  ReplicatedModule::State& first = *models.front()->state_;
  for (const ReplicatedModule* model : models) {
    TORCH_CHECK_VALUE(model->state_->group_ == first.group_,
                      "join: expected models of one process group, got "
                      "several groups.\nCall join() once per group.");
  }
  JoinSession session(first.group_);
  size_t num_entered = 0;
  const auto leave = c10::make_scope_exit([&] {
    for (size_t i = 0; i < num_entered; ++i) models[i]->state_->leave();
  });
  for (; num_entered < models.size(); ++num_entered) {
    models[num_entered]->state_->enter(session, divisor,
                                       /*is_first=*/num_entered == 0);
  }
  models.front()->reducer().barrier("called join()");
  require_agreement(
      first.group_, "join: option",
      std::array{std::string("divisor: ") + (divisor == JoinDivisor::kWorldSize
                                                 ? "kWorldSize"
                                                 : "kRanksWithData")},
      absl::OkStatus());
  loop();
  for (;;) {
    first.begin_iteration();
    if (!session.begin_shadow()) break;
    for (const ReplicatedModule* model : models) {
      if (model != models.front()) model->state_->begin_iteration();
      model->state_->shadow();
    }
  }
  const int source = session.last_rank_with_data();
  if (source < 0) return;
  for (const ReplicatedModule* model : models) model->state_->copy_from(source);
}

}  // namespace brigade
