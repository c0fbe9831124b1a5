#include "brigade/reducer/reducer.h"

#include <c10/util/Exception.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "brigade/comm/group/group_collectives.h"
#include "brigade/comm_hooks/hook_traits.h"
#include "brigade/hooks/backward_events.h"
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

void Reducer::expect_forwards() { engine_->expect_forwards(); }

void Reducer::shadow_iteration() { engine_->shadow(); }

void Reducer::meet_peers(std::string_view deed) { engine_->meet_peers(deed); }

void Reducer::broadcast_before_forward(std::vector<at::Tensor> tensors,
                                       int source) {
  const std::string doing = absl::StrCat(
      "broadcasting ", tensors.size(),
      tensors.size() == 1 ? " buffer" : " buffers", " from rank ", source);
  engine_->call_before_forward(doing, [&] {
    broadcast_tensors(engine_->policy().group(), std::move(tensors), source);
  });
}

void Reducer::await_statuses() { engine_->await_statuses(); }

void Reducer::end_iteration() { engine_->end_iteration(); }

bool Reducer::rebuild_buckets() { return engine_->replan(); }

void Reducer::set_comm_hook(std::shared_ptr<c10d::CommHookInterface> hook) {
  TORCH_CHECK_VALUE(
      !engine_->policy().options().reproducible ||
          (hook && traits_of(*hook).sums_in_order),
      "Reducer::set_comm_hook: expected a hook that sums in the order of the "
      "ranks, since reproducible is set, found ",
      hook ? "another one" : "null", ".\nLeave out the hook or reproducible.");
  engine_->set_hook(std::move(hook));
}

std::shared_ptr<const c10d::CommHookInterface> Reducer::comm_hook() const {
  return engine_->locked(
      [](DataParallelPolicy& policy) { return policy.options().comm_hook; });
}

bool Reducer::hook_steps_parameters() const {
  return engine_->locked([](DataParallelPolicy& policy) {
    return policy.hook_traits().steps_parameters;
  });
}

BucketPlan Reducer::plan() const {
  return engine_->locked(
      [](DataParallelPolicy& policy) { return policy.plan(); });
}

void Reducer::stop_watching_gradients() {
  TORCH_CHECK_VALUE(
      !engine_->policy().options().find_unused_parameters,
      "Reducer::stop_watching_gradients: find_unused_parameters must be false, "
      "it is true: parameters are found in the graph by the accumulators that "
      "the reducer watches.\nSet static_graph instead.");
  engine_->stop_watching_gradients();
}

void Reducer::gradient_ready(size_t parameter, size_t replica) {
  TORCH_CHECK(!engine_->is_watching_gradients(),
              "Reducer::gradient_ready: this reducer watches its gradients "
              "itself.\nCall stop_watching_gradients() first.");
  const ParameterTable& table = engine_->policy().table();
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
  return engine_->locked(
      [](DataParallelPolicy& policy) { return policy.is_learning(); });
}

void Reducer::finalize_backward() { engine_->finalize(); }

std::vector<size_t> Reducer::missing_gradients() const {
  return engine_->policy().table().parameters_of(engine_->missing_gradients());
}

ReducerStatistics Reducer::statistics() const { return engine_->statistics(); }

void Reducer::forward_begins() { engine_->forward_begins(); }

Timeline Reducer::timeline() const { return engine_->timeline(); }

void Reducer::set_timeline_sample_rate(int64_t sample_rate) {
  engine_->set_timeline_sample_rate(sample_rate);
}

void Reducer::set_stall_report_after(std::chrono::milliseconds time) {
  engine_->set_stall_report_after(time);
}

void Reducer::set_stall_handler(
    std::function<void(const std::string& report)> handler) {
  engine_->set_stall_handler(std::move(handler));
}

std::optional<ReductionError> Reducer::last_error() const {
  return engine_->last_error();
}

at::Tensor Reducer::used_parameter_counts() {
  return engine_->locked([](DataParallelPolicy& policy) {
    UsedParameters* const used = policy.used_parameters();
    return used ? used->counts().clone() : at::Tensor();
  });
}

bool Reducer::can_continue() const { return engine_->can_continue(); }

void Reducer::abort_group() { engine_->abort_group(); }

bool Reducer::is_graph_static() const {
  return engine_->locked(
      [](DataParallelPolicy& policy) { return policy.is_graph_static(); });
}

}  // namespace brigade
