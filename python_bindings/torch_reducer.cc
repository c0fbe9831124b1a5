#include "brigade/python_bindings/torch_reducer.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "brigade/comm_hooks/hook_traits.h"
#include "brigade/reducer/auto_plan.h"

namespace brigade {
namespace {

// Returns the lines of torch's error that programs search for.
std::string describe_missing(const std::vector<size_t>& missing,
                             const std::vector<std::string>& names, int rank) {
  std::string text =
      "\n\nExpected to have finished reduction in the prior iteration.";
  if (!names.empty()) {
    absl::StrAppend(
        &text, "\nParameters which did not receive grad for rank ", rank, ": ",
        absl::StrJoin(missing, ", ", [&](std::string* out, size_t parameter) {
          absl::StrAppend(out, names[parameter]);
        }));
  }
  absl::StrAppend(&text,
                  "\nParameter indices which did not receive grad for rank ",
                  rank, ": ", absl::StrJoin(missing, ", "));
  return text;
}

// Returns how users of frameworks set find_unused_parameters.
const char* how_to_set_unused(const ReducerOptions& options) {
  if (options.find_unused_parameters || options.static_graph) return "";
  return "\nTo set find_unused_parameters: "
         "DistributedDataParallel(find_unused_parameters=True); "
         "Lightning: strategy=\"ddp_find_unused_parameters_true\"; accelerate: "
         "kwargs_handlers=[DistributedDataParallelKwargs("
         "find_unused_parameters=True)]; transformers' Trainer: "
         "ddp_find_unused_parameters=True.";
}

auto is_in(std::unordered_set<const c10::TensorImpl*> tensors) {
  return [tensors = std::move(tensors)](const at::Tensor& tensor) {
    return tensors.contains(tensor.unsafeGetTensorImpl());
  };
}

// Splits each bucket into parameters with and without `predicate`.
template <typename Predicate>
std::vector<std::vector<size_t>> split_buckets(
    const std::vector<std::vector<size_t>>& buckets,
    const Predicate& predicate) {
  std::vector<std::vector<size_t>> split;
  for (std::vector<size_t> bucket : buckets) {
    const auto others = std::ranges::stable_partition(bucket, predicate);
    const std::vector<size_t> rest(others.begin(), others.end());
    bucket.erase(others.begin(), others.end());
    for (const std::vector<size_t>& part : {bucket, rest}) {
      if (!part.empty()) split.push_back(part);
    }
  }
  return split;
}

// Runs a hook on buckets of undivided gradients in a floating-point dtype, for
// torch's native mixed precision.
class ReducedPrecisionHook final : public WrappingHook {
 public:
  ReducedPrecisionHook(CommHookPtr hook, at::ScalarType dtype)
      : WrappingHook(std::move(hook)), dtype_(dtype) {}

  // Complex and integer gradients keep their dtype.
  WireFormat wire_format(at::ScalarType gradient_dtype) const override {
    return {.dtype =
                c10::isFloatingType(gradient_dtype) ? dtype_ : gradient_dtype};
  }
  HookTraits traits() const override {
    HookTraits traits = WrappingHook::traits();
    traits.sums_in_order = false;
    traits.throws_own_errors = true;
    return traits;
  }

 private:
  const at::ScalarType dtype_;
};

std::shared_ptr<c10d::CommHookInterface> built_in_hook(
    c10d::BuiltinCommHookType type,
    const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  return type == c10d::BuiltinCommHookType::FP16_COMPRESS
             ? fp16_hook(group)
             : all_reduce_hook(group);
}

}  // namespace

TorchReducer::TorchReducer(std::vector<at::Tensor> parameters,
                           c10::intrusive_ptr<c10d::ProcessGroup> group,
                           ReducerOptions options,
                           std::vector<std::vector<size_t>> first_buckets)
    : parameters_(std::move(parameters)),
      first_buckets_(std::move(first_buckets)),
      group_(std::move(group)),
      options_(std::move(options)) {
  if (options_.reproducible) {
    ordered_ = std::make_shared<OrderedAllReduce>(group_);
  }
  make();
  if (ordered_ && options_.verify_across_ranks) {
    ordered_->connect_for(parameters_);
  }
  options_.verify_across_ranks = false;  // compare only once
}

void TorchReducer::make() {
  reducer_ = nullptr;  // first: hooks of two reducers would see each gradient
  if (hook_name_.empty()) {
    const std::shared_ptr<HostSums> host_sums =
        averaging_ ? averaging_->host_sums() : nullptr;
    averaging_ = default_hook(group_, std::nullopt, ordered_);
    averaging_->take_host_sums(host_sums);
    options_.comm_hook = averaging_;
  }
  launched_before_ = 0;
  failures_dropped_ = 0;
  ReducerOptions options = options_;
  options.comm_hook = with_steps(std::move(options.comm_hook));
  try {
    reducer_ = std::make_unique<Reducer>(parameters_, group_,
                                         std::move(options), first_buckets_);
    if (plans_automatically_) attach_auto_plan();
    if (!watches_gradients_) reducer_->stop_watching_gradients();
  } catch (const c10::ValueError& error) {
    TORCH_CHECK(false, error.what_without_backtrace());
  }
  reducer_->set_manual_finalization(finalizes_manually_);
  if (expects_forwards_) reducer_->expect_forwards();
  reducer_->set_timeline_sample_rate(logging_sample_rate_);
  if (stall_report_after_) {
    reducer_->set_stall_report_after(*stall_report_after_);
  }
}

std::shared_ptr<c10d::CommHookInterface> TorchReducer::with_steps(
    std::shared_ptr<c10d::CommHookInterface> hook) const {
  if (!step_) return hook;
  return python_stepping_hook(std::move(hook), step_, is_in(stepped_));
}

void TorchReducer::step_in_backward(const std::vector<at::Tensor>& parameters,
                                    ParameterStep step) {
  TORCH_CHECK(!plans_automatically_,
              "Reducer: expected no optimizer steps in backward with "
              "bucket_plan=\"auto\", which mixes parameters with and without a "
              "step.\nLeave out one of them.");
  step_ = std::move(step);
  for (const at::Tensor& parameter : parameters) {
    stepped_.insert(parameter.unsafeGetTensorImpl());
  }
  const auto is_stepped = is_in(stepped_);
  if (!std::ranges::all_of(parameters_, is_stepped)) {
    options_.bucket_plan = split_buckets(
        buckets(), [&](size_t i) { return is_stepped(parameters_[i]); });
  }
  if (!hooks_removed_) make();
}

// There is no optimizer of the user's that would drop them.
void TorchReducer::drop_gradients_of_failed_steps() {
  if (!step_) return;
  const int64_t failures = statistics().aborted;
  if (std::exchange(failures_dropped_, failures) == failures) return;
  const auto is_stepped = is_in(stepped_);
  for (const at::Tensor& parameter : parameters_) {
    if (is_stepped(parameter)) parameter.mutable_grad().reset();
  }
}

bool TorchReducer::ready() {
  if (!reducer_ && !hooks_removed_) make();
  return reducer_ != nullptr;
}

void TorchReducer::prepare_for_forward() {
  if (!ready()) return;
  averaging_->divide_by_world_size();
  check_last_backward();
  reducer_->forward_begins();
  drop_gradients_of_failed_steps();
}

void TorchReducer::prepare_for_backward(
    const std::vector<at::Tensor>& outputs) {
  if (!ready()) return;
  check_last_backward();
  launched_before_ = reducer_->statistics().buckets_launched;
  reducer_->prepare_for_backward(outputs);
  drop_gradients_of_failed_steps();
}

void TorchReducer::note_local_forward(const std::vector<at::Tensor>& outputs) {
  if (!reducer_) return;
  reducer_->note_local_forward(outputs);
  drop_gradients_of_failed_steps();
}

bool TorchReducer::rebuild_buckets() {
  if (!ready()) return false;
  check_last_backward();
  return reducer_->rebuild_buckets();
}

void TorchReducer::plan_automatically() {
  plans_automatically_ = group_->getSize() > 1;
  if (plans_automatically_ && reducer_) attach_auto_plan();
}

void TorchReducer::attach_auto_plan() {
  AutoPlan::attach(*reducer_, parameters_, options_.expect_sparse_gradients,
                   group_);
}

void TorchReducer::shadow_iteration(bool use_world_size) {
  if (!ready()) return;
  averaging_->divide_by_world_size();
  if (ordered_ && !use_world_size) divide_by_count(/*has_data=*/false);
  reducer_->shadow_iteration();
}

// Every rank counts the ranks with data: in an ordered all-reduce, ranks
// without data divide their part of the sum, too.
void TorchReducer::divide_by_count(bool has_data) {
  averaging_->divide_by(
      [ordered = ordered_, has_data, device = parameters_.front().device()] {
        // float32: exact, and available on all devices.
        const at::Tensor count =
            at::full({1}, has_data ? 1.0 : 0.0,
                     at::TensorOptions(at::kFloat).device(device));
        ordered->run(count, 1)->waitAndThrow();
        return count.item<double>();
      });
}

void TorchReducer::meet_peers() {
  if (!ready()) return;
  // This is a forward without gradients between two backwards of an iteration.
  if (!at::GradMode::is_enabled() && !missing_gradients().empty()) return;
  reducer_->barrier("came to a forward");
}

bool TorchReducer::send_buffers(std::vector<at::Tensor> buffers) {
  if (!ready()) return false;
  reducer_->broadcast_before_forward(std::move(buffers), 0);
  return true;
}

std::vector<size_t> TorchReducer::missing_gradients() const {
  return reducer_ ? reducer_->missing_gradients() : std::vector<size_t>();
}

// Throws the reducer's error with the lines that programs search for.
void TorchReducer::check_last_backward() {
  const std::vector<size_t> missing = missing_gradients();
  if (missing.empty()) return;
  try {
    reducer_->end_iteration();
  } catch (const c10::DistBackendError&) {
    throw;
  } catch (const c10::Error& error) {
    TORCH_CHECK(
        false, error.what_without_backtrace(), how_to_set_unused(options_),
        describe_missing(missing, options_.parameter_names, group_->getRank()));
  }
}

void TorchReducer::check_finalized() const {
  const std::vector<size_t> missing = missing_gradients();
  TORCH_CHECK(
      missing.empty(), "Reducer: the last backward left ", missing.size(),
      " of ", parameters_.size(),
      " parameters without gradients; its reduction is not finished.",
      describe_missing(missing, options_.parameter_names, group_->getRank()));
}

void TorchReducer::register_comm_hook(
    std::shared_ptr<c10d::CommHookInterface> hook, std::string name) {
  TORCH_CHECK(
      hook_name_.empty(), "Reducer: ", name,
      " can't be registered: the comm hook is already ", hook_name_,
      // The text of torch's error, for which programs search.
      ", and register_comm_hook or register_builtin_comm_hook can only "
      "be called once.\nRegister one hook, which may call other hooks.");
  TORCH_CHECK(
      !options_.reproducible, "Reducer: ", name,
      " can't be registered: reproducible is set, and a comm hook may add "
      "gradients in another order.\nLeave out one of them.");
  TORCH_CHECK(
      !hooks_removed_, "Reducer: ", name,
      " can't be registered: _remove_autograd_hooks() was called, so that "
      "no gradients are reduced.");
  if (reducer_) reducer_->set_comm_hook(with_steps(hook));
  options_.comm_hook = std::move(hook);
  hook_name_ = std::move(name);
}

void TorchReducer::set_mixed_precision_dtype(
    std::optional<at::ScalarType> dtype) {
  watches_gradients_ = false;
  // A hook with a wire format, for example FP16_COMPRESS, has its own dtype.
  const bool chooses = traits_of(*options_.comm_hook).wire_format == nullptr;
  if (dtype && chooses) {
    options_.comm_hook = std::make_shared<ReducedPrecisionHook>(
        std::move(options_.comm_hook), *dtype);
  }
  if (!hooks_removed_) make();
}

void TorchReducer::expect_forwards() {
  expects_forwards_ = true;
  if (reducer_) reducer_->expect_forwards();
}

void TorchReducer::set_manual_finalization(bool required) {
  finalizes_manually_ = required;
  if (ready()) reducer_->set_manual_finalization(required);
}

bool TorchReducer::must_finalize_after_backward() const {
  return finalizes_manually_ && reducer_ &&
         reducer_->must_finalize_after_backward();
}

void TorchReducer::finalize_backward() {
  TORCH_CHECK(reducer_,
              "Reducer: no gradient reduction requires finalization.");
  reducer_->finalize_backward();
}

void TorchReducer::register_builtin_comm_hook(c10d::BuiltinCommHookType type) {
  const bool is_fp16 = type == c10d::BuiltinCommHookType::FP16_COMPRESS;
  register_comm_hook(built_in_hook(type, group_),
                     is_fp16 ? "FP16_COMPRESS" : "ALLREDUCE");
  built_in_ = type;
}

void TorchReducer::set_divisor(c10::intrusive_ptr<c10d::Work> count,
                               bool use_world_size) {
  if (use_world_size) return;
  if (ordered_) return divide_by_count(/*has_data=*/true);
  averaging_->divide_by([count = std::move(count)] {
    const auto future = count->getFuture();
    future->waitAndThrow();
    return tensor_of_hook_result(future->value()).item<double>();
  });
}

void TorchReducer::set_static_graph() {
  if (options_.static_graph) return;
  const int64_t iterations = statistics().prepared;
  TORCH_CHECK(iterations == 0,
              "Reducer: expected _set_static_graph() before the first "
              "iteration, found iteration ",
              iterations, ".\nPass static_graph=True to the constructor.");
  options_.static_graph = true;
  if (!hooks_removed_) make();
}

at::Tensor TorchReducer::used_parameter_counts() {
  if (!reducer_) return {};
  const at::Tensor counts = reducer_->used_parameter_counts();
  if (!counts.defined()) return counts;
  return counts.to(parameters_.front().device());
}

bool TorchReducer::is_graph_static() const {
  if (!reducer_ || !options_.find_unused_parameters) return true;
  return reducer_->is_graph_static();
}

void TorchReducer::set_process_group(
    c10::intrusive_ptr<c10d::ProcessGroup> group) {
  group_ = std::move(group);
  if (averaging_) averaging_->take_host_sums(nullptr);
  if (ordered_) ordered_ = std::make_shared<OrderedAllReduce>(group_);
  if (built_in_) options_.comm_hook = built_in_hook(*built_in_, group_);
  if (!hooks_removed_) make();
}

void TorchReducer::remove_hooks() {
  hooks_removed_ = true;
  reducer_ = nullptr;
}

void TorchReducer::set_logging_sample_rate(int64_t rate) {
  TORCH_CHECK_VALUE(rate >= 1, "Reducer: sample_rate must be at least 1, got ",
                    rate, ".\nPass the number of iterations between samples.");
  logging_sample_rate_ = rate;
  if (reducer_) reducer_->set_timeline_sample_rate(rate);
}

void TorchReducer::set_stall_report_after(std::chrono::milliseconds time) {
  TORCH_CHECK_VALUE(time.count() >= 0,
                    "Reducer: set_stall_report_after: expected a time >= 0, "
                    "found ",
                    time.count(), " ms.\nPass 0 for no reports.");
  if (ready()) reducer_->set_stall_report_after(time);
  stall_report_after_ = time;
}

std::vector<std::vector<size_t>> TorchReducer::buckets() const {
  if (!reducer_) return {};
  return reducer_->plan().buckets();
}

}  // namespace brigade
