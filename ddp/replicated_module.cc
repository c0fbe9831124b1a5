#include "brigade/ddp/replicated_module.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "brigade/comm/agreement.h"
#include "brigade/comm_hooks/averaging_hook.h"
#include "brigade/comm_hooks/ordered_all_reduce.h"
#include "brigade/comm_hooks/routing_hook.h"
#include "brigade/ddp/bucket_choice.h"
#include "brigade/ddp/module_broadcast.h"
#include "brigade/ddp/module_check.h"

namespace brigade {
namespace {

using Names = std::vector<std::string>;

std::vector<NamedTensor> without(std::vector<NamedTensor> tensors,
                                 const Names& ignored) {
  std::erase_if(tensors, [&](const NamedTensor& entry) {
    return std::find(ignored.begin(), ignored.end(), entry.name) !=
           ignored.end();
  });
  return tensors;
}

// What gradients travel in, if not in their own dtype or as a hook decides.
std::optional<at::ScalarType> wire_dtype(
    const DistributedDataParallelOptions& options) {
  const std::optional<MixedPrecision>& precision = options.mixed_precision;
  if (!precision || options.reducer.comm_hook) return std::nullopt;
  return precision->reduction.value_or(precision->parameters);
}

std::string name_of(std::optional<at::ScalarType> dtype) {
  return dtype ? c10::toString(*dtype) : "unset";
}

absl::Status check_precision(const DistributedDataParallelOptions& options) {
  const std::optional<MixedPrecision>& precision = options.mixed_precision;
  if (!precision) return absl::OkStatus();
  for (const at::ScalarType dtype :
       {precision->parameters,
        precision->reduction.value_or(precision->parameters),
        precision->buffers.value_or(precision->parameters)}) {
    if (dtype == at::kBFloat16 || dtype == at::kHalf || dtype == at::kFloat ||
        dtype == at::kDouble) {
      continue;
    }
    return absl::InvalidArgumentError(
        absl::StrCat("mixed_precision: dtypes must be BFloat16, Half, Float or "
                     "Double, got ",
                     c10::toString(dtype)));
  }
  if (precision->reduction && options.reducer.comm_hook) {
    return absl::InvalidArgumentError(
        "mixed_precision.reduction must be unset beside a comm hook, which "
        "decides what travels; leave out one of them");
  }
  return absl::OkStatus();
}

absl::Status check_reproducible(const DistributedDataParallelOptions& options) {
  if (!options.reducer.reproducible || options.parameter_groups.empty()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      "reproducible: parameter_groups must be empty, since their sums are not "
      "ordered; leave out one of them");
}

// What decides which collectives are launched where.
std::vector<std::string> describe_options(
    const DistributedDataParallelOptions& options) {
  constexpr const char* kModes[] = {"kNone", "kBeforeForward", "kAfterForward"};
  std::vector<std::string> items = {
      absl::StrCat("buffer_mode = ",
                   kModes[static_cast<size_t>(options.buffer_mode)]),
      absl::StrCat("buffer_hook = ", options.buffer_hook ? "given" : "none"),
      absl::StrCat("delayed = ", absl::StrJoin(options.delayed, ", "))};
  if (const auto& precision = options.mixed_precision) {
    items.push_back(
        absl::StrCat("mixed_precision = ", c10::toString(precision->parameters),
                     ", reduction ", name_of(precision->reduction),
                     ", buffers ", name_of(precision->buffers)));
  }
  for (const ParameterGroup& group : options.parameter_groups) {
    items.push_back(absl::StrCat("a parameter group of ",
                                 absl::StrJoin(group.names, ", ")));
  }
  return items;
}

// Checks what is left of the replicas, and across ranks.
std::vector<ModuleReplica> checked(
    std::vector<ModuleReplica> replicas,
    const DistributedDataParallelOptions& options,
    const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  const Names& ignored = options.ignored;
  absl::Status choice = check_choice(replicas.front().tensors, options);
  choice.Update(check_precision(options));
  choice.Update(check_reproducible(options));
  std::vector<ModuleTensors> tensors;
  for (ModuleReplica& replica : replicas) {
    ModuleTensors& own = replica.tensors;
    own.parameters = without(std::move(own.parameters), ignored);
    own.buffers = without(std::move(own.buffers), ignored);
    tensors.push_back(own);
    if (ignored.empty()) continue;
    replica.buffers = [all = std::move(replica.buffers), ignored] {
      return without(all(), ignored);
    };
  }
  verify_modules(tensors, group, choice);
  require_agreement(group, "option", describe_options(options),
                    absl::OkStatus());
  return replicas;
}

std::vector<BufferLookup> buffers_of(
    const std::vector<ModuleReplica>& replicas) {
  std::vector<BufferLookup> lookups;
  for (const ModuleReplica& replica : replicas) {
    lookups.push_back(replica.buffers);
  }
  return lookups;
}

std::vector<NamedTensor> trainable(std::vector<NamedTensor> parameters) {
  std::erase_if(parameters, [](const NamedTensor& parameter) {
    return !parameter.tensor.requires_grad();
  });
  return parameters;
}

std::vector<at::Tensor> trainable_tensors(
    const std::vector<NamedTensor>& parameters) {
  std::vector<at::Tensor> tensors;
  for (const NamedTensor& named : trainable(parameters)) {
    tensors.push_back(named.tensor);
  }
  return tensors;
}

// Parameters of groups of their own travel there, the others by `hook`.
std::shared_ptr<c10d::CommHookInterface> route(
    std::shared_ptr<c10d::CommHookInterface> hook,
    std::span<const NamedTensor> parameters,
    const DistributedDataParallelOptions& options) {
  const std::vector<ParameterGroup>& groups = options.parameter_groups;
  if (groups.empty()) return hook;
  std::vector<Route> routes;
  for (const ParameterGroup& group : groups) {
    routes.push_back({.parameters = {},
                      .hook = std::make_shared<AveragingHook>(
                          group.group, wire_dtype(options))});
    for (const auto& [name, tensor] : parameters) {
      if (group_of(name, groups) != &group) continue;
      routes.back().parameters.push_back(tensor);
    }
  }
  return std::make_shared<RoutingHook>(std::move(hook), std::move(routes));
}

std::optional<ForwardPrecision> forward_precision(
    const std::vector<ModuleReplica>& replicas,
    const std::optional<MixedPrecision>& precision) {
  if (!precision) return std::nullopt;
  std::vector<NamedTensor> parameters;
  for (const ModuleReplica& replica : replicas) {
    const std::vector<NamedTensor>& own = replica.tensors.parameters;
    parameters.insert(parameters.end(), own.begin(), own.end());
  }
  return ForwardPrecision(parameters, precision->parameters);
}

void cast_buffers(const std::vector<ModuleReplica>& replicas,
                  const std::optional<MixedPrecision>& precision) {
  if (!precision || !precision->buffers) return;
  for (const ModuleReplica& replica : replicas) {
    for (const auto& [name, buffer] : replica.buffers()) {
      if (!buffer.is_floating_point()) continue;
      buffer.set_data(buffer.to(*precision->buffers));
    }
  }
}

std::unique_ptr<Reducer> make_reducer(
    const std::vector<ModuleReplica>& replicas,
    c10::intrusive_ptr<c10d::ProcessGroup> group,
    const DistributedDataParallelOptions& options,
    std::shared_ptr<c10d::CommHookInterface> hook) {
  std::vector<std::vector<at::Tensor>> parameters;
  for (const ModuleReplica& replica : replicas) {
    parameters.push_back(trainable_tensors(replica.tensors.parameters));
  }
  const std::vector<NamedTensor> named =
      trainable(replicas.front().tensors.parameters);
  ReducerOptions chosen = options.reducer;
  if (chosen.parameter_names.empty()) {
    for (const NamedTensor& parameter : named) {
      chosen.parameter_names.push_back(parameter.name);
    }
  }
  if (auto buckets = choose_buckets(named, options);
      buckets.ok() &&
      !buckets->empty()) {  // else the reducer says what's wrong
    chosen.bucket_plan = *std::move(buckets);
  }
  chosen.comm_hook = route(std::move(hook), named, options);
  auto reducer = std::make_unique<Reducer>(
      std::move(parameters), std::move(group), std::move(chosen));
  reducer->expect_forwards();
  return reducer;
}

}  // namespace

ReplicatedModule::ReplicatedModule(std::vector<ModuleReplica> replicas,
                                   c10::intrusive_ptr<c10d::ProcessGroup> group,
                                   DistributedDataParallelOptions options)
    : group_(std::move(group)),
      replicas_(checked(std::move(replicas), options, group_)),
      parameter_groups_(options.parameter_groups),
      buffer_mode_(options.buffer_mode),
      buffers_(buffers_of(replicas_), options.buffer_hook, group_),
      precision_(forward_precision(replicas_, options.mixed_precision)) {
  std::shared_ptr<c10d::CommHookInterface> hook = options.reducer.comm_hook;
  std::shared_ptr<OrderedAllReduce> ordered;
  if (!hook) {
    if (options.reducer.reproducible) {
      ordered = std::make_shared<OrderedAllReduce>(
          group_,
          OrderedOptions{.group_size = options.reducer.reproducible_row_size});
    }
    averaging_ = default_hook(group_, wire_dtype(options), ordered);
    hook = averaging_;
  }
  reducer_ = make_reducer(replicas_, group_, options, std::move(hook));
  if (ordered && options.reducer.verify_across_ranks) {
    ordered->connect_for(
        trainable_tensors(replicas_.front().tensors.parameters));
  }
  for (const ModuleReplica& replica : replicas_) {
    watches_.emplace_back(replica.view, replica.tensors, options.ignored);
  }
  cast_buffers(replicas_, options.mixed_precision);
  copy_from(0);
}

void ReplicatedModule::before_forward() {
  // No bad step is evaluated.
  if (!at::GradMode::is_enabled()) reducer_->await_statuses();
  if (!will_reduce()) return;
  for (ModuleWatch& watch : watches_) watch.check();
  reducer_->forward_begins();
  meet_peers();
  if (session_ != nullptr) {
    if (announces_) session_->begin_iteration();
    follow_divisor();
  }
  if (opens_with_buffers()) {
    buffers_.broadcast_by([this](std::vector<at::Tensor> buffers) {
      reducer_->broadcast_before_forward(std::move(buffers), /*source=*/0);
    });
  } else if (sends_buffers(BufferMode::kBeforeForward)) {
    make_buffers_equal();
  }
}

void ReplicatedModule::follow_divisor() {
  if (session_->options().divide_by != JoinDivisor::kRanksWithData) return;
  averaging_->divide_by([session = session_] {
    return static_cast<double>(session->num_ranks_with_data());
  });
}

void ReplicatedModule::meet_peers() {
  // Before anything that one rank may fail in alone.
  reducer_->rebuild_buckets();
  if (opens_with_buffers()) return;
  if (session_ != nullptr || sends_buffers(BufferMode::kBeforeForward)) {
    reducer_->meet_peers("came to a forward");
  }
}

// A user's hook broadcasts by itself, and so does a rank of a join() whose data
// may have ended.
bool ReplicatedModule::opens_with_buffers() const {
  return session_ == nullptr && !buffers_.are_sent_by_hook() &&
         sends_buffers(BufferMode::kBeforeForward);
}

bool ReplicatedModule::sends_buffers(BufferMode place) const {
  return buffer_mode_ == place && !buffers_.are_none();
}

void ReplicatedModule::after_forward(const std::vector<at::Tensor>& outputs) {
  if (!at::GradMode::is_enabled()) return;
  if (!synchronizes_) return reducer_->note_local_forward(outputs);
  if (sends_buffers(BufferMode::kAfterForward)) {
    // A forward may have failed on one rank alone.
    reducer_->meet_peers("came to the end of a forward");
    make_buffers_equal();
  }
  reducer_->prepare_for_backward(outputs);
}

bool ReplicatedModule::will_reduce() const {
  return synchronizes_ && at::GradMode::is_enabled();
}

void ReplicatedModule::sync_buffers() {
  if (buffers_.are_none()) return;
  // A forward or a loss may have failed on one rank alone.
  reducer_->meet_peers("called sync_buffers()");
  make_buffers_equal();
}

void ReplicatedModule::make_buffers_equal() {
  try {
    buffers_.run(session_ == nullptr ? 0 : session_->first_rank_with_data());
  } catch (const c10::DistBackendError&) {
    reducer_->abort_group();
    throw;
  }
}

void ReplicatedModule::enter(JoinSession& session, bool announces) {
  TORCH_CHECK(session_ == nullptr,
              "join: this model is being joined already.\nLet the inner loop "
              "run inside the outer join.");
  TORCH_CHECK_VALUE(parameter_groups_.empty(),
                    "join: a model with parameter groups can't be joined, "
                    "since a group may run out before the others.\nGive every "
                    "rank equally many inputs.");
  TORCH_CHECK_VALUE(
      reducer_->comm_hook() == averaging_ ||
          session.options().divide_by == JoinDivisor::kWorldSize,
      "join: the divisor must be kWorldSize, since the comm hook is the user's "
      "own and divides by itself; it is kRanksWithData.\nLeave out the hook or "
      "the divisor.");
  session_ = &session;
  announces_ = announces;
}

void ReplicatedModule::leave() noexcept {
  session_ = nullptr;
  if (averaging_) averaging_->divide_by_world_size();
}

void ReplicatedModule::shadow() {
  if (buffer_mode_ == BufferMode::kAfterForward) {
    reducer_->meet_peers("came to the end of a forward");
  }
  if (buffer_mode_ != BufferMode::kNone && !buffers_.are_none()) {
    make_buffers_equal();
  }
  follow_divisor();
  reducer_->shadow_iteration();
}

void ReplicatedModule::copy_from(int rank) {
  const std::vector<NamedTensor>& parameters =
      replicas_.front().tensors.parameters;
  std::vector<NamedTensor> of_all_ranks;
  for (const NamedTensor& parameter : parameters) {
    if (group_of(parameter.name, parameter_groups_) != nullptr) continue;
    of_all_ranks.push_back(parameter);
  }
  broadcast_from(rank, of_all_ranks, "parameters", group_);
  for (const ParameterGroup& own : parameter_groups_) {
    std::vector<NamedTensor> of_group;
    for (const NamedTensor& parameter : parameters) {
      if (group_of(parameter.name, parameter_groups_) != &own) continue;
      of_group.push_back(parameter);
    }
    broadcast_from(/*source=*/0, of_group, "parameters of a group", own.group);
  }
  for (size_t r = 1; r < replicas_.size(); ++r) {
    copy_values(parameters, replicas_[r].tensors.parameters);
  }
  buffers_.broadcast(rank);
}

}  // namespace brigade
