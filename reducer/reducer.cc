#include "brigade/reducer/reducer.h"

#include <c10/util/Exception.h>
#include <c10/util/Type.h>

#include <exception>
#include <mutex>
#include <set>
#include <stdexcept>
#include <typeinfo>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "brigade/comm/agreement.h"
#include "brigade/comm/errors/error_texts.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/group/group_collectives.h"
#include "brigade/comm/group/group_info.h"
#include "brigade/comm_hooks/hook_traits.h"
#include "brigade/hooks/autograd_hooks.h"
#include "brigade/reducer/engine.h"

namespace brigade {
namespace {

using Buckets = std::vector<std::vector<size_t>>;

BucketPlan initial_plan(const ParameterTable& table,
                        const std::vector<int64_t>& caps_bytes,
                        const Buckets& given) {
  if (given.empty()) {
    return value_or_throw(plan_by_size(
        table.specs(), reverse_registration_order(table.size()), caps_bytes));
  }
  throw_if_error(check_bucket_caps(caps_bytes));  // for the rebuilt plan
  BucketPlan plan = value_or_throw(BucketPlan::create(given, table.size()));
  throw_if_error(check_bucket_kinds(plan, table.specs()));
  return plan;
}

void check_devices(const ParameterTable& table,
                   const c10d::ProcessGroup& group) {
  // Parameters of one kind have one device: checks the first of each.
  int num_kinds = 0;
  for (size_t i = 0; i < table.size(); ++i) {
    if (table.specs()[i].kind < num_kinds) continue;
    ++num_kinds;
    const at::Device device = table[i].device();
    TORCH_CHECK_VALUE(
        supports_device(group, device.type()), table.name_of(i), " is on ",
        device,
        ", but the process group has no backend for that device; create a "
        "group for that device, or move the parameter");
  }
}

// `hook`: the user's, or null.
void check_reproducible(c10d::CommHookInterface* hook,
                        const ParameterTable& table) {
  TORCH_CHECK_VALUE(
      hook == nullptr || traits_of(*hook).sums_in_order,
      "reproducible: expected no comm hook, or one that sums in rank order; "
      "remove the hook or reproducible");
  for (size_t i = 0; i < table.size(); ++i) {
    TORCH_CHECK_VALUE(
        !table.is_sparse(i), "reproducible: expected dense gradients, but ",
        table.name_of(i), " has a sparse gradient; remove reproducible");
  }
}

std::string describe_hook(c10d::CommHookInterface& hook,
                          const ParameterTable& table) {
  const HookTraits traits = traits_of(hook);
  if (traits.wire_format == nullptr) {
    return traits.name.empty() ? c10::demangle(typeid(hook).name())
                               : traits.name;
  }
  std::set<std::string> formats;
  for (const at::Tensor& parameter : table.tensors()) {
    const at::ScalarType dtype = parameter.scalar_type();
    formats.insert(absl::StrCat(describe_dtype(dtype), " is sent as ",
                                describe_dtype(traits.wire_dtype(dtype))));
  }
  return absl::StrJoin(formats, ", ");
}

std::string describe_flag(const char* flag, bool value) {
  return absl::StrCat(flag, value ? ": true" : ": false");
}

// Returns the options that must be equal on all ranks, one line each.
std::vector<std::string> describe_options(const ReducerOptions& options,
                                          const Buckets& given,
                                          const ParameterTable& table) {
  std::vector<std::string> buckets;
  for (const std::vector<size_t>& bucket : given) {
    buckets.push_back(absl::StrCat("[", absl::StrJoin(bucket, ", "), "]"));
  }
  return {
      absl::StrCat("local replicas: ", table.num_replicas()),
      absl::StrCat("bucket_cap_bytes: [",
                   absl::StrJoin(options.bucket_cap_bytes, ", "), "]"),
      absl::StrCat("bucket_plan: [", absl::StrJoin(buckets, ", "), "]"),
      describe_flag("buckets are rebuilt", rebuilds_buckets(options)),
      describe_flag("find_unused_parameters", options.find_unused_parameters),
      describe_flag("skip_all_reduce_unused_parameters",
                    options.skip_all_reduce_unused_parameters),
      describe_flag("static_graph", options.static_graph),
      absl::StrCat("max_unconfirmed_iterations: ",
                   options.max_unconfirmed_iterations),
      describe_flag("reproducible", options.reproducible),
      absl::StrCat("comm_hook: ", describe_hook(*options.comm_hook, table))};
}

// Checks the arguments of a constructor, and compares them with all ranks. A
// rank with bad arguments takes part, so that all ranks throw.
ReducerSetup checked_setup(std::vector<std::vector<at::Tensor>> replicas,
                           c10::intrusive_ptr<c10d::ProcessGroup> group,
                           ReducerOptions options,
                           const Buckets& first_buckets) {
  TORCH_CHECK_VALUE(group,
                    "Reducer needs a process group, got null.\n"
                    "Create one with init_process_group(), or with "
                    "single_process_group() for a world size of 1.");
  if (!replicas.empty() && !replicas.front().empty() &&
      replicas.front().front().defined()) {
    suggest_control_device(group, replicas.front().front().device());
  }
  const Buckets& given =
      options.bucket_plan.empty() ? first_buckets : options.bucket_plan;
  std::optional<ParameterTable> table;
  std::optional<BucketPlan> plan;
  absl::Status local;  // this rank's error, which all ranks throw below
  try {
    TORCH_CHECK_VALUE(
        options.max_unconfirmed_iterations >= 0 &&
            options.max_unconfirmed_iterations <= 32,
        "expected max_unconfirmed_iterations from 0 to 32, found ",
        options.max_unconfirmed_iterations, ".\nPass 1.");
    table.emplace(std::move(replicas), std::move(options.parameter_names),
                  options.expect_sparse_gradients);
    check_devices(*table, *group);
    if (options.reproducible) {
      check_reproducible(options.comm_hook.get(), *table);
    }
    plan = initial_plan(*table, options.bucket_cap_bytes, given);
  } catch (const c10::ValueError& error) {
    local = absl::InvalidArgumentError(
        absl::StrCat("Reducer: ", error.what_without_backtrace()));
  }
  std::shared_ptr<OrderedAllReduce> ordered;
  if (!options.comm_hook && options.reproducible) {
    ordered = std::make_shared<OrderedAllReduce>(group);
  }
  if (!options.comm_hook) {
    options.comm_hook = default_hook(group, std::nullopt, ordered);
  }

  const bool compares = group->getSize() > 1 && options.verify_across_ranks;
  std::vector<std::string> items;
  if (local.ok() && compares) items = table->describe_all();
  if (options.verify_across_ranks) {
    require_agreement(group, "Reducer: parameter", items, local);
  } else {
    throw_if_error(local);
  }
  if (compares) {
    require_agreement(group, "Reducer: option",
                      describe_options(options, given, *table),
                      absl::OkStatus());
  }
  if (ordered && options.verify_across_ranks) {
    ordered->connect_for(table->tensors());
  }
  return {.group = std::move(group),
          .options = std::move(options),
          .table = *std::move(table),
          .plan = *std::move(plan)};
}

// Moves the list; a list in braces would copy it.
std::vector<std::vector<at::Tensor>> only_replica(
    std::vector<at::Tensor> parameters) {
  std::vector<std::vector<at::Tensor>> replicas;
  replicas.push_back(std::move(parameters));
  return replicas;
}

}  // namespace

Reducer::Reducer(std::vector<at::Tensor> parameters,
                 c10::intrusive_ptr<c10d::ProcessGroup> group,
                 ReducerOptions options,
                 const std::vector<std::vector<size_t>>& first_buckets)
    : Reducer(only_replica(std::move(parameters)), std::move(group),
              std::move(options), first_buckets) {}

Reducer::Reducer(std::vector<std::vector<at::Tensor>> replicas,
                 c10::intrusive_ptr<c10d::ProcessGroup> group,
                 ReducerOptions options,
                 const std::vector<std::vector<size_t>>& first_buckets)
    : engine_(std::make_unique<Engine>(
          checked_setup(std::move(replicas), std::move(group),
                        std::move(options), first_buckets))) {}

Reducer::~Reducer() = default;

void Reducer::prepare(const std::vector<at::Tensor>& outputs) {
  engine_->prepare(outputs);
}

void Reducer::note_local_forward(const std::vector<at::Tensor>& outputs) {
  engine_->note_local_forward(outputs);
}

void Reducer::expect_forwards() {
  engine_->locked([&] {
    engine_->expects_forwards_ = engine_->policy_.group()->getSize() > 1;
  });
}

void Reducer::shadow_iteration() { engine_->shadow(); }

void Reducer::barrier(std::string_view action) {
  engine_->noting_errors([&] { engine_->barrier(action); });
}

void Reducer::broadcast_before_forward(std::vector<at::Tensor> tensors,
                                       int source) {
  const std::string action =
      absl::StrCat("broadcasting ", counted(tensors.size(), "buffer"),
                   " from rank ", source);
  engine_->noting_errors([&] {
    engine_->barrier("came to a forward");
    engine_->call_between_iterations(action, [&] {
      broadcast_tensors(engine_->policy_.group(), std::move(tensors), source);
    });
  });
}

void Reducer::await_statuses() {
  engine_->noting_errors([&] {
    engine_->end_.confirm_ends();
    const std::string& failure = engine_->end_.late_failure();
    if (!failure.empty()) {
      throw_peer_error("Reducer",
                       std::make_exception_ptr(std::runtime_error(failure)));
    }
    const std::string report = engine_->report_missing();
    if (!report.empty()) TORCH_WARN(report);
  });
}

void Reducer::end_iteration() {
  engine_->noting_errors([&] { engine_->end_unfinished_iteration(); });
}

void Reducer::call_after_iterations(std::function<void()> function) {
  engine_->locked([&] { engine_->after_iteration_ = std::move(function); });
}

bool Reducer::rebuild_buckets() { return engine_->replan(); }

void Reducer::set_comm_hook(std::shared_ptr<c10d::CommHookInterface> hook) {
  TORCH_CHECK_VALUE(
      !engine_->policy_.options().reproducible ||
          (hook && traits_of(*hook).sums_in_order),
      "Reducer::set_comm_hook: expected a hook that sums in rank order, since "
      "reproducible is set, found ",
      hook ? "another hook" : "null", ".\nRemove the hook or reproducible.");
  engine_->set_hook(std::move(hook));
}

std::shared_ptr<const c10d::CommHookInterface> Reducer::comm_hook() const {
  return engine_->locked([&] { return engine_->policy_.options().comm_hook; });
}

bool Reducer::hook_steps_parameters() const {
  return engine_->locked(
      [&] { return engine_->policy_.hook_traits().steps_parameters; });
}

void Reducer::set_bucket_plan(std::vector<std::vector<size_t>> buckets) {
  engine_->change_sequence("Reducer::set_bucket_plan", [&] {
    const bool has_changed = engine_->policy_.set_plan(std::move(buckets));
    engine_->peers_.set_agreed(0);  // compare also if it is the same
    return has_changed;
  });
}

BucketPlan Reducer::plan() const {
  return engine_->locked([&] { return engine_->policy_.plan(); });
}

void Reducer::stop_watching_gradients() {
  TORCH_CHECK_VALUE(
      !engine_->policy_.options().find_unused_parameters,
      "Reducer::stop_watching_gradients: expected find_unused_parameters = "
      "false, found true: the graph search needs the gradient hooks.\nSet "
      "static_graph instead.");
  engine_->locked([&] {
    engine_->require_not_reducing("Reducer::stop_watching_gradients");
    engine_->hooks_->remove();
  });
}

void Reducer::gradient_ready(size_t parameter, size_t replica) {
  TORCH_CHECK(engine_->hooks_->are_removed(),
              "Reducer::gradient_ready: this reducer watches its gradients "
              "itself.\nCall stop_watching_gradients() first.");
  const ParameterTable& table = engine_->policy_.table();
  TORCH_CHECK_VALUE(
      parameter < table.size() && replica < table.num_replicas(),
      "Reducer::gradient_ready: expected a parameter below ", table.size(),
      " and a replica below ", table.num_replicas(), ", got parameter ",
      parameter, " of replica ", replica,
      ".\nPass the index in the list that the constructor was given.");
  TORCH_CHECK(running_backward_id() >= 0,
              "Reducer::gradient_ready: this thread runs no backward.\nCall it "
              "from a hook that runs in backward.");
  const VariableIndex variable = {.replica = replica, .parameter = parameter};
  engine_->gradient_ready(variable, table[variable].grad().defined());
}

void Reducer::set_manual_finalization(bool required) {
  engine_->set_manual_finalization(required);
}

bool Reducer::must_finalize_after_backward() const {
  return engine_->locked([&] { return engine_->policy_.is_learning(); });
}

void Reducer::finalize_backward() { engine_->finalize(); }

bool Reducer::can_continue() const {
  return engine_->locked([&] { return !engine_->peers_.is_closed(); });
}

void Reducer::abort_group() {
  engine_->locked([&] {
    engine_->peers_.send_and_close(
        {.kind = StatusKind::kFailed,
         .iteration = engine_->observations_.counts.begun,
         .text = status_text("A collective outside the iteration failed.")});
  });
}

std::optional<ReductionError> Reducer::last_error() const {
  const std::lock_guard<std::mutex> lock(engine_->error_mutex_);
  return engine_->last_error_;
}

std::vector<size_t> Reducer::missing_gradients() const {
  return engine_->locked([&]() -> std::vector<size_t> {
    if (!engine_->has_begun()) return {};
    return engine_->policy_.table().parameters_of(
        missing(*engine_->iteration_));
  });
}

ReducerStatistics Reducer::statistics() const {
  return engine_->locked([&] { return engine_->observations_.counts; });
}

void Reducer::forward_begins() {
  engine_->locked([&] {
    Observations& observations = engine_->observations_;
    observations.timeline.forward_begins(observations.counts.begun + 1);
  });
}

Timeline Reducer::timeline() const {
  return engine_->locked(
      [&] { return engine_->observations_.timeline.last(); });
}

int64_t Reducer::set_timeline_sample_rate(int64_t sample_rate) {
  TORCH_CHECK_VALUE(
      sample_rate >= 0,
      "Reducer: the timeline's sample rate must be at least 0, got ",
      sample_rate,
      ".\nPass the number of iterations between samples, or 0 for no "
      "timeline.");
  return engine_->locked([&] {
    return engine_->observations_.timeline.set_sample_rate(sample_rate);
  });
}

void Reducer::set_stall_report_after(std::chrono::milliseconds time) {
  TORCH_CHECK_VALUE(
      time.count() >= 0,
      "Reducer::set_stall_report_after: expected at least 0, got ",
      time.count(),
      " ms.\nPass the time after which a stall is reported, or 0 for never.");
  engine_->stall_report_after_ = time;
  if (engine_->stall_watch_) engine_->stall_watch_->set_report_after(time);
}

void Reducer::set_stall_handler(
    std::function<void(const std::string& report)> handler) {
  if (engine_->stall_watch_) {
    engine_->stall_watch_->set_handler(std::move(handler));
  } else {
    engine_->stall_handler_ = std::move(handler);
  }
}

at::Tensor Reducer::used_parameter_counts() {
  return engine_->locked([&] {
    UsedParameters* const used = engine_->policy_.used_parameters();
    return used ? used->counts().clone() : at::Tensor();
  });
}

bool Reducer::is_graph_static() const {
  return engine_->locked([&] { return engine_->policy_.is_graph_static(); });
}

}  // namespace brigade
