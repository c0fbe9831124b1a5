#include "brigade/reducer/reducer.h"

#include <c10/util/Exception.h>

#include <exception>
#include <stdexcept>
#include <utility>

#include "absl/strings/str_cat.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/group/group_collectives.h"
#include "brigade/comm_hooks/hook_traits.h"
#include "brigade/hooks/autograd_hooks.h"
#include "brigade/reducer/engine.h"

namespace brigade {
namespace {

// A list in braces would copy it.
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
                        std::move(options), first_buckets))) {
  engine_->connect();
}

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

void Reducer::meet_peers(std::string_view deed) {
  engine_->noting_errors([&] { engine_->come_together(deed); });
}

void Reducer::broadcast_before_forward(std::vector<at::Tensor> tensors,
                                       int source) {
  const std::string doing = absl::StrCat(
      "broadcasting ", tensors.size(),
      tensors.size() == 1 ? " buffer" : " buffers", " from rank ", source);
  engine_->noting_errors([&] {
    engine_->come_together("came to a forward");
    engine_->call_between_iterations(doing, [&] {
      broadcast_tensors(engine_->policy_.group(), std::move(tensors), source);
    });
  });
}

void Reducer::await_statuses() {
  engine_->noting_errors([&] {
    engine_->end_.confirm_ends();
    const std::string& failure = engine_->end_.late_failure();
    if (failure.empty()) return;
    throw_peer_error("Reducer",
                     std::make_exception_ptr(std::runtime_error(failure)));
  });
}

void Reducer::end_iteration() {
  engine_->noting_errors([&] { engine_->end_unfinished_iteration(); });
}

bool Reducer::rebuild_buckets() { return engine_->replan(); }

void Reducer::set_comm_hook(std::shared_ptr<c10d::CommHookInterface> hook) {
  TORCH_CHECK_VALUE(
      !engine_->policy_.options().reproducible ||
          (hook && traits_of(*hook).sums_in_order),
      "Reducer::set_comm_hook: expected a hook that sums in the order of the "
      "ranks, since reproducible is set, found ",
      hook ? "another one" : "null", ".\nLeave out the hook or reproducible.");
  engine_->set_hook(std::move(hook));
}

std::shared_ptr<const c10d::CommHookInterface> Reducer::comm_hook() const {
  return engine_->locked([&] { return engine_->policy_.options().comm_hook; });
}

bool Reducer::hook_steps_parameters() const {
  return engine_->locked(
      [&] { return engine_->policy_.hook_traits().steps_parameters; });
}

BucketPlan Reducer::plan() const {
  return engine_->locked([&] { return engine_->policy_.plan(); });
}

void Reducer::stop_watching_gradients() {
  TORCH_CHECK_VALUE(
      !engine_->policy_.options().find_unused_parameters,
      "Reducer::stop_watching_gradients: find_unused_parameters must be false, "
      "it is true: parameters are found in the graph by the accumulators that "
      "the reducer watches.\nSet static_graph instead.");
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
      ".\nGive the index in the list that the reducer was made of.");
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
    engine_->peers_.leave(
        {.kind = StatusKind::kFailed,
         .iteration = engine_->observations_.counts.begun,
         .text = status_text("A collective beside the iteration failed.")});
  });
}

std::optional<ReductionError> Reducer::last_error() const {
  return engine_->observations_.last_error();
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

void Reducer::set_timeline_sample_rate(int64_t sample_rate) {
  TORCH_CHECK_VALUE(
      sample_rate >= 0,
      "Reducer: the timeline's sample rate must be at least 0, got ",
      sample_rate,
      ".\nGive the number of iterations between samples, or 0 for no "
      "timeline.");
  engine_->locked(
      [&] { engine_->observations_.timeline.set_sample_rate(sample_rate); });
}

void Reducer::set_stall_report_after(std::chrono::milliseconds time) {
  TORCH_CHECK_VALUE(
      time.count() >= 0,
      "Reducer::set_stall_report_after: expected at least 0, got ",
      time.count(),
      " ms.\nGive the time after which a stall is reported, or 0 for never.");
  Observations& observations = engine_->observations_;
  observations.stall_report_after = time;
  if (observations.stall_watch)
    observations.stall_watch->set_report_after(time);
}

void Reducer::set_stall_handler(
    std::function<void(const std::string& report)> handler) {
  Observations& observations = engine_->observations_;
  if (observations.stall_watch) {
    observations.stall_watch->set_handler(std::move(handler));
  } else {
    observations.stall_handler = std::move(handler);
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
