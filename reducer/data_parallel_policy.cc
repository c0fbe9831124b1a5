#include "brigade/reducer/data_parallel_policy.h"

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <c10/util/hash.h>
#include <torch/csrc/distributed/autograd/context/context.h>

#include <algorithm>
#include <ranges>
#include <tuple>
#include <utility>

#include "brigade/comm/backends/end_on_own_thread.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/group/group_info.h"
#include "brigade/comm/ordered/host_sums.h"
#include "brigade/comm_hooks/hook_traits.h"
#include "brigade/hooks/graph_search.h"
#include "brigade/planning/bucket_plan.h"
#include "brigade/reducer/gradient_errors.h"

namespace brigade {
namespace {

using torch::distributed::autograd::ThreadLocalDistAutogradContext;

// Returns the number of iterations before buckets are rebuilt; 0: never.
int64_t observed_iterations(const ReducerOptions& options) {
  if (!rebuilds_buckets(options)) return 0;
  // Torch rebuilds in its third forward; programs count warm-up iterations so.
  return options.static_graph ? 2 : 1;
}

std::unique_ptr<UsedParameters> used_parameters(const ReducerOptions& options,
                                                const ParameterTable& table,
                                                c10d::ProcessGroup& group) {
  const bool is_static = options.static_graph;
  if (!is_static && !options.find_unused_parameters) return nullptr;
  return std::make_unique<UsedParameters>(
      table, group, !is_static && options.skip_all_reduce_unused_parameters);
}

// Hash of the buckets' parameters, lengths, strides and wire dtypes, in order.
// Equal in all processes of the same build.
uint64_t plan_fingerprint(const BucketPlan& plan, const ParameterTable& table,
                          const HookTraits& hook) {
  uint64_t fingerprint = plan.num_buckets();
  const auto add = [&](uint64_t number) {
    fingerprint = c10::hash_combine(fingerprint, number);
  };
  for (const std::vector<size_t>& bucket : plan.buckets()) {
    add(bucket.size());
    for (const size_t parameter : bucket) {
      add(parameter);
      add(table.numel(parameter));
      const at::IntArrayRef shape = table.shape(parameter);
      const at::IntArrayRef strides = table.gradient_strides(parameter);
      for (size_t d = 0; d < strides.size(); ++d) {
        if (shape[d] > 1) add(strides[d]);
      }
      add(static_cast<uint64_t>(hook.wire_dtype(table.dtype(parameter))));
    }
  }
  if (!hook.name.empty()) add(std::hash<std::string>()(hook.name));
  return fingerprint;
}

}  // namespace

// ---- The graph, learned in the first iterations.

void ReadyOrder::agree(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  if (stage_ == Stage::kAgreed) return;
  const std::vector<int64_t> mine(order_.begin(), order_.end());
  std::vector<at::Tensor> tensors = {
      at::tensor(mine, at::kLong).to(control_device(*group))};
  group->broadcast(tensors)->wait();
  const at::Tensor agreed = tensors.front().cpu();
  const int64_t* begin = agreed.const_data_ptr<int64_t>();
  order_.assign(begin, begin + agreed.numel());
  stage_ = Stage::kAgreed;
}

HookCounts::HookCounts(size_t num_variables)
    : counts_(num_variables), last_run_(num_variables) {}

void HookCounts::restart() { std::fill(counts_.begin(), counts_.end(), 0); }

bool HookCounts::count_run(size_t variable) {
  ++counts_[variable];
  if (!is_learning()) return counts_[variable] == expected_[variable];
  last_run_[variable] = ++num_runs_;
  return false;
}

std::vector<size_t> HookCounts::freeze() {
  // An abort does not reset a rank that learns alone: the others would not
  // count with it.
  stage_ = stage_ == Stage::kLearning ? Stage::kCounted : Stage::kKnown;
  expected_ = counts_;
  std::vector<size_t> called;
  for (size_t i = 0; i < counts_.size(); ++i) {
    (counts_[i] > 0 ? called : silent_).push_back(i);
  }
  std::sort(called.begin(), called.end(),
            [this](size_t a, size_t b) { return last_run_[a] < last_run_[b]; });
  last_run_ = {};
  return called;
}

void HookCounts::confirm() {
  if (stage_ == Stage::kLearning) stage_ = Stage::kLearningAlone;
  if (stage_ == Stage::kCounted) stage_ = Stage::kKnown;
}

void HookCounts::abort() {
  if (stage_ == Stage::kCounted) *this = HookCounts(counts_.size());
}

// ---- The policy.

ContextGradients::~ContextGradients() {
  for (auto& [key, taken] : taken_) {
    taken.parameter.mutable_grad() = std::move(taken.former_gradient);
  }
}

void ContextGradients::take(const at::Tensor& parameter,
                            const MemoryRanges& buckets) {
  if (!context_) {
    context_ = ThreadLocalDistAutogradContext::getContextPtr();
    if (!context_) return;
  }
  at::Tensor former = parameter.grad();
  if (former.defined() && buckets.contains(former)) former = former.clone();
  taken_.try_emplace(parameter.unsafeGetTensorImpl(),
                     Taken{.parameter = parameter, .former_gradient = former});
  context_->runGradCallbackForVariable(parameter,
                                       [&parameter](at::Tensor& gradient) {
                                         parameter.mutable_grad() = gradient;
                                         return false;
                                       });
}

void ContextGradients::write_back() {
  for (auto& [key, taken] : std::exchange(taken_, {})) {
    context_->runGradCallbackForVariable(
        taken.parameter, [&parameter = taken.parameter](at::Tensor& gradient) {
          if (parameter.grad().defined()) gradient = parameter.grad();
          return true;
        });
    taken.parameter.mutable_grad() = std::move(taken.former_gradient);
  }
}

DataParallelPolicy::DataParallelPolicy(ReducerSetup setup)
    : group_(std::move(setup.group)),
      table_(std::move(setup.table)),
      options_(std::move(setup.options)),
      hook_(traits_of(*options_.comm_hook)),
      ready_order_(observed_iterations(options_)),
      hook_counts_(options_.static_graph
                       ? std::optional<HookCounts>(table_.num_variables())
                       : std::nullopt),
      used_(brigade::used_parameters(options_, table_, *group_)),
      bound_(bind(std::move(setup.plan), hook_)) {
  for (const Bucket& bucket : bound_.buckets) bucket.list_memory(memory_);
}

void DataParallelPolicy::set_hooks(const GradientHooks& hooks) {
  hooks_ = &hooks;
  if (used_ && !hook_counts_) unused_search_.emplace(hooks.accumulators());
}

// Ranks agree that every hook declares a wire format, but not that every rank
// uses the default hook, so HostSums::get_or_make() compares `wants`.
void DataParallelPolicy::connect_on_host() {
  if (options_.reproducible || !hook_.wire_format) return;
  const bool wants =
      hook_.host_sums != nullptr &&
      std::ranges::any_of(table_.tensors(), [](const at::Tensor& parameter) {
        return parameter.is_cpu();
      });
  host_sums_ = HostSums::get_or_make(group_, wants);
  if (host_sums_) hook_.host_sums->take_host_sums(host_sums_);
}

bool DataParallelPolicy::set_hook(
    std::shared_ptr<c10d::CommHookInterface> hook) {
  if (!hook) {
    const auto averaging = default_hook(group_);
    averaging->take_host_sums(host_sums_);
    hook = averaging;
  }
  HookTraits traits = traits_of(*hook);
  const bool fits = std::ranges::all_of(
      bound_.buckets,
      [&](const Bucket& bucket) { return bucket.fits(traits); });
  if (fits) {
    bound_.fingerprint = plan_fingerprint(bound_.plan, table_, traits);
    for (Bucket& bucket : bound_.buckets) bucket.set_hook(traits);
  } else {
    adopt(bind(bound_.plan, traits));
  }
  options_.comm_hook = std::move(hook);
  hook_ = std::move(traits);
  return !fits;
}

bool DataParallelPolicy::is_graph_static() const {
  return options_.static_graph || (unused_search_ && found_same_unused_);
}

bool DataParallelPolicy::is_learning() const {
  return ready_order_.is_observing() ||
         (hook_counts_ && hook_counts_->is_learning());
}

// A static graph reduces its used-parameter bitmap, the last entry, only once.
std::span<Collective* const> DataParallelPolicy::sequence() const {
  const bool reduces_bitmap = !hook_counts_ || hook_counts_->are_all_learning();
  return reduces_bitmap
             ? bound_.sequence
             : std::span(bound_.sequence).first(bound_.buckets.size());
}

bool DataParallelPolicy::skips_unused_buckets() const {
  return used_ && used_->goes_first();
}

// A discriminator is frozen while its generator is trained.
bool DataParallelPolicy::expects_gradients() const {
  return std::ranges::any_of(table_.replicas() | std::views::join,
                             &at::Tensor::requires_grad);
}

bool DataParallelPolicy::replan() {
  return take(value_or_throw(plan_by_size(table_.specs(), ready_order_.order(),
                                          options_.bucket_cap_bytes)));
}

bool DataParallelPolicy::set_plan(std::vector<std::vector<size_t>> buckets) {
  BucketPlan plan =
      value_or_throw(BucketPlan::create(std::move(buckets), table_.size()));
  throw_if_error(check_bucket_kinds(plan, table_.specs()));
  return take(std::move(plan));
}

bool DataParallelPolicy::take(BucketPlan plan) {
  const bool is_other = plan != bound_.plan;
  if (is_other) adopt(bind(std::move(plan), hook_));
  ready_order_.freeze();
  return is_other;
}

void DataParallelPolicy::before_iteration() {
  ready_order_.restart();
  for (Bucket& bucket : bound_.buckets) bucket.restart();
  unused_.clear();
  none_reached_ = false;
  without_gradient_.reset();
  context_gradients_.emplace();
}

void DataParallelPolicy::check_variables() const {
  if (const auto detached = hooks_->first_detached(table_.replicas())) {
    TORCH_CHECK(false, "Reducer: ", table_.name_of(detached->parameter),
                " was moved or cast after the reducer was made, so the "
                "reducer does not see its gradient.\n"
                "Move or cast the module before you wrap it.");
  }
  if (const auto resized = table_.first_resized()) {
    TORCH_CHECK(false, "Reducer: ", table_.describe_resized(*resized),
                ".\nResize parameters before you wrap the module.");
  }
  if (!options_.gradient_as_bucket_view) return;
  for (size_t r = 0; r < table_.num_replicas(); ++r) {
    for (size_t i = 0; i < table_.size(); ++i) {
      keep_out_of_buckets({.replica = r, .parameter = i});
    }
  }
}

// The user may have assigned a view of another gradient's slot to `.grad`. That
// slot may be reduced while autograd still accumulates here, so it is copied.
void DataParallelPolicy::keep_out_of_buckets(VariableIndex variable) const {
  at::Tensor& gradient = table_[variable].mutable_grad();
  if (!gradient.defined() || gradient.layout() != at::kStrided) return;
  const auto [bucket, slot] = bound_.plan.locate(variable.parameter);
  if (bound_.buckets[bucket].is_view_in(variable.replica, slot, gradient)) {
    return;
  }
  if (memory_.contains(gradient)) gradient = gradient.clone();
}

// Searches the graph of every forward. To skip searches while all parameters
// are used would make the time of a launch depend on earlier iterations: a rank
// with a newly unused parameter would launch later than its peers.
void DataParallelPolicy::on_prepared(std::span<const at::Tensor> outputs) {
  if (hook_counts_) hook_counts_->restart();
  if (unused_search_) {
    // Torch's name, which tools search for.
    RECORD_FUNCTION("torch.distributed.ddp.reducer::search_unused_parameters",
                    c10::ArrayRef<const c10::IValue>());
    unused_ = unused_search_->unreached(outputs);
    if (std::exchange(has_searched_, true) && unused_ != last_found_unused_) {
      found_same_unused_ = false;
    }
    last_found_unused_ = unused_;
  } else if (!hook_counts_) {
    return;
  } else if (!hook_counts_->is_learning()) {
    unused_ = hook_counts_->silent();
  } else if (!hooks_->are_removed()) {
    // Reentrant checkpoints hide their parameters, so the search only shows
    // whether any parameter is reached.
    none_reached_ =
        GraphSearch(hooks_->accumulators()).unreached(outputs).size() ==
        table_.num_variables();
    return;
  }
  none_reached_ = unused_.size() == table_.num_variables();
}

bool DataParallelPolicy::begins_at_outputs() const {
  return skips_unused_buckets() || !unused_.empty();
}

// A shadow's marks belong to earlier backwards, whose gradients are not
// reduced.
void DataParallelPolicy::mark_used_at_begin(bool is_shadow) {
  if (is_shadow) {
    if (used_) used_->clear_marks();
  } else if (skips_unused_buckets()) {
    for (size_t i = 0; i < table_.num_variables(); ++i) {
      if (!std::ranges::binary_search(unused_, i)) used_->mark(i);
    }
  }
}

void DataParallelPolicy::note_missing_gradients() {
  if (!used_ || without_gradient_) return;
  without_gradient_.emplace();
  for (size_t number = 0; number < table_.num_variables(); ++number) {
    if (table_[table_.variable(number)].grad().defined()) continue;
    without_gradient_->push_back(number);
  }
}

void DataParallelPolicy::on_backward_begins(bool is_shadow, Mark mark) {
  if (hook_.listener) hook_.listener->iteration_begins(!is_shadow);
  if (!is_shadow) {
    note_missing_gradients();
    return mark_unused(mark, unused_);
  }
  for (const std::vector<size_t>& bucket : bound_.plan.buckets()) {
    for (const size_t parameter : bucket) ready_order_.note(parameter);
  }
}

// An autograd function may write `.grad` itself and return an undefined
// gradient. Source: torch's Reducer, which also checks `.grad`.
void DataParallelPolicy::on_local_gradient(VariableIndex variable,
                                           bool is_defined) {
  if (used_ && (is_defined || table_[variable].grad().defined())) {
    used_->mark(table_.number_of(variable));
  }
}

std::optional<Slot> DataParallelPolicy::on_gradient(VariableIndex variable,
                                                    bool is_defined) {
  on_local_gradient(variable, is_defined);
  if (is_defined) context_gradients_->take(table_[variable], memory_);
  const size_t bucket = bound_.plan.locate(variable.parameter).bucket;
  bound_.buckets[bucket].gradient_produced(variable.replica);
  const size_t number = table_.number_of(variable);
  if (hook_counts_ && !hook_counts_->count_run(number)) return std::nullopt;
  return ready_slot(variable, number);
}

Slot DataParallelPolicy::ready_slot(VariableIndex variable, size_t number) {
  if (variable.replica == 0) ready_order_.note(variable.parameter);
  const size_t bucket = bound_.plan.locate(variable.parameter).bucket;
  return {.entry = static_cast<uint32_t>(bound_.first_bucket + bucket),
          .has_gradient = has_gradient(number)};
}

void DataParallelPolicy::mark_unused(Mark mark,
                                     std::span<const size_t> variables) {
  for (const size_t number : variables) {
    Slot slot = ready_slot(table_.variable(number), number);
    slot.has_gradient = false;
    mark(number, slot);
  }
}

void DataParallelPolicy::on_backward_ends(Mark mark) {
  if (!hook_counts_ || !hook_counts_->is_learning()) return;
  for (const size_t number : hook_counts_->freeze()) {
    mark(number, ready_slot(table_.variable(number), number));
  }
  mark_unused(mark, hook_counts_->silent());
}

void DataParallelPolicy::on_end_confirmed() {
  ready_order_.observe();
  if (hook_counts_) hook_counts_->confirm();
}

void DataParallelPolicy::on_end_refuted() {
  if (hook_counts_) hook_counts_->abort();
}

void DataParallelPolicy::on_iteration_over(Outcome outcome, bool is_shadow) {
  if (used_) used_->clear_marks();
  if (is_shadow && hook_.listener) {
    hook_.listener->iteration_begins(/*has_data=*/true);
  }
  if (outcome == Outcome::kAborted && hook_counts_) hook_counts_->abort();
  // An unused parameter keeps its gradient: ranks with and without one would
  // step differently later.
  const auto missing = std::exchange(without_gradient_, std::nullopt);
  if (missing && outcome == Outcome::kAborted) {
    for (const size_t number : *missing) {
      table_[table_.variable(number)].mutable_grad().reset();
    }
  }
  if (outcome == Outcome::kDelivered) context_gradients_->write_back();
  context_gradients_.reset();
}

void DataParallelPolicy::drop_views() const {
  for (size_t number = 0; number < table_.num_variables(); ++number) {
    const VariableIndex variable = table_.variable(number);
    at::Tensor& gradient = table_[variable].mutable_grad();
    const auto [bucket, slot] = bound_.plan.locate(variable.parameter);
    if (gradient.defined() &&
        bound_.buckets[bucket].is_view_in(variable.replica, slot, gradient)) {
      gradient.reset();
    }
  }
}

std::shared_ptr<void> DataParallelPolicy::abandon() {
  BoundPlan fresh = bind(bound_.plan, hook_);  // may throw
  BoundPlan old = std::move(bound_);
  adopt(std::move(fresh));
  return keep(std::move(old));
}

std::shared_ptr<void> DataParallelPolicy::let_go() {
  return keep(std::move(bound_));
}

// Collectives in flight still use their buckets, the bitmap's result, and the
// hook, whose continuations they run. The hook may own its group.
std::shared_ptr<void> DataParallelPolicy::keep(BoundPlan bound) {
  at::Tensor sum = used_ ? used_->abandon() : at::Tensor();
  return end_on_own_thread(
      std::tuple(std::move(bound), std::move(sum), options_.comm_hook));
}

void DataParallelPolicy::adopt(BoundPlan bound) {
  for (Bucket& bucket : bound.buckets) bucket.adopt_gradients();
  bound_ = std::move(bound);
  memory_ = {};
  for (const Bucket& bucket : bound_.buckets) bucket.list_memory(memory_);
}

BoundPlan DataParallelPolicy::bind(BucketPlan plan, const HookTraits& hook) {
  std::vector<Bucket> buckets;
  buckets.reserve(plan.num_buckets());
  for (size_t b = 0; b < plan.num_buckets(); ++b) {
    buckets.emplace_back(table_, plan, b, hook,
                         options_.gradient_as_bucket_view, used_.get());
  }
  std::vector<Collective*> sequence;
  sequence.reserve(buckets.size() + 1);
  if (skips_unused_buckets()) sequence.push_back(used_.get());
  const size_t first_bucket = sequence.size();
  for (Bucket& bucket : buckets) sequence.push_back(&bucket);
  if (used_ && !skips_unused_buckets()) sequence.push_back(used_.get());
  const uint64_t fingerprint = plan_fingerprint(plan, table_, hook);
  return {.plan = std::move(plan),
          .buckets = std::move(buckets),
          .sequence = std::move(sequence),
          .first_bucket = first_bucket,
          .fingerprint = fingerprint};
}

void DataParallelPolicy::refuse(VariableIndex variable, IterationId id) const {
  const size_t number = table_.number_of(variable);
  const size_t parameter = variable.parameter;
  if (hook_counts_ && hook_counts_->is_silent(number)) {
    TORCH_CHECK(false, describe_unexpected_gradient(table_, parameter, id));
  }
  TORCH_CHECK(false,
              std::ranges::binary_search(unused_, number)
                  ? describe_gradient_of_unused(table_, parameter, id)
                  : describe_second_gradient(table_, parameter, id, options_));
}

}  // namespace brigade
