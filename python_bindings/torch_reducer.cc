#include "brigade/python_bindings/torch_reducer.h"

#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <utility>

#include "brigade/comm_hooks/all_reduce_hook.h"
#include "brigade/comm_hooks/wire_format.h"

namespace brigade {
namespace {

void check_supported(const TorchReducerOptions& options) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !options.find_unused_parameters,
      "brigade.Reducer: find_unused_parameters=True is not there yet.\nUse "
      "every parameter in the loss, or torch's own class.");
}

}  // namespace

TorchReducer::TorchReducer(std::vector<at::Tensor> parameters,
                           c10::intrusive_ptr<c10d::ProcessGroup> group,
                           TorchReducerOptions options)
    : parameters_(std::move(parameters)),
      group_(std::move(group)),
      options_(std::move(options)),
      awaited_(std::make_shared<AwaitedFutures>()) {
  check_supported(options_);
  make();
}

void TorchReducer::make() {
  reducer_ = nullptr;  // hooks of two reducers would both see a gradient
  if (hook_name_.empty()) {
    averaging_ = std::make_shared<AveragingHook>(group_);
    options_.reducer.comm_hook = averaging_;
  }
  try {
    reducer_ = std::make_unique<Reducer>(parameters_, group_, options_.reducer);
  } catch (const c10::ValueError& error) {
    TORCH_CHECK(false, error.what_without_backtrace());
  }
}

bool TorchReducer::ready() {
  if (!reducer_ && !hooks_removed_) make();
  return reducer_ != nullptr;
}

void TorchReducer::prepare_for_forward() {
  if (!ready()) return;
  averaging_->divide_by_world_size();
  remember_errors([this] {
    awaited_->wait();  // no backward came
    reducer_->recover();
  });
}

void TorchReducer::prepare_for_backward(
    const std::vector<at::Tensor>& outputs) {
  if (!ready()) return;
  remember_errors([&] {
    // Watching outputs would make an error of second derivatives through them,
    // and of a second backward, which torch lets accumulate on this rank.
    reducer_->prepare_for_backward(std::vector<at::Tensor>());
    awaited_->wait_after_backward(outputs);
  });
}

void TorchReducer::cancel_preparation() {
  if (reducer_) reducer_->cancel_preparation();
}

bool TorchReducer::rebuild_buckets() {
  const int64_t rebuilds = statistics().rebuilds;
  return rebuilds > std::exchange(rebuilds_told_, rebuilds);
}

void TorchReducer::register_comm_hook(
    std::shared_ptr<c10d::CommHookInterface> hook, std::string name) {
  TORCH_CHECK(hook_name_.empty(), "brigade.Reducer: ", name,
              " can't be registered: the comm hook is ", hook_name_,
              " already.\nRegister one hook; it may call others.");
  TORCH_CHECK(!hooks_removed_, "brigade.Reducer: ", name,
              " can't be registered: hooks were removed from the parameters");
  options_.reducer.comm_hook = std::move(hook);
  hook_name_ = std::move(name);
  make();
}

void TorchReducer::register_builtin_comm_hook(c10d::BuiltinCommHookType type) {
  switch (type) {
    case c10d::BuiltinCommHookType::ALLREDUCE:
      return register_comm_hook(all_reduce_hook(group_), "ALLREDUCE");
    case c10d::BuiltinCommHookType::FP16_COMPRESS:
      return register_comm_hook(fp16_hook(group_), "FP16_COMPRESS");
  }
  TORCH_CHECK_VALUE(false, "brigade.Reducer: unknown built-in comm hook ",
                    static_cast<int>(type));
}

c10::intrusive_ptr<c10::ivalue::Future> TorchReducer::run_comm_hook(
    c10d::GradBucket& bucket) {
  return options_.reducer.comm_hook->runHook(bucket);
}

c10::intrusive_ptr<c10::ivalue::Future> TorchReducer::run_all_reduce_hook(
    c10d::GradBucket& bucket) {
  return all_reduce_hook(group_)->runHook(bucket);
}

void TorchReducer::set_divisor(c10::intrusive_ptr<c10d::Work> count,
                               bool use_world_size) {
  if (!use_world_size) averaging_->divide_by(std::move(count));
}

void TorchReducer::await_at_end(std::vector<AwaitedFutures::Future> futures) {
  awaited_->add(std::move(futures));
}

void TorchReducer::set_static_graph() {
  remember_errors([this] {
    const int64_t iterations = statistics().prepared;
    TORCH_CHECK(iterations == 0,
                "brigade.Reducer: a static graph was declared in iteration ",
                iterations,
                ", but its first iteration has to be watched.\nGive "
                "static_graph=True to the constructor.");
  });
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "brigade.Reducer: static_graph=True is not there yet");
}

void TorchReducer::set_process_group(
    c10::intrusive_ptr<c10d::ProcessGroup> group) {
  group_ = std::move(group);
  if (!hooks_removed_) make();
}

void TorchReducer::remove_hooks() {
  hooks_removed_ = true;
  reducer_ = nullptr;
}

void TorchReducer::set_logging_sample_rate(int64_t rate) {
  TORCH_CHECK_VALUE(rate >= 1,
                    "brigade.Reducer: the sample rate must be at least 1, got ",
                    rate, ".\nGive the number of iterations between samples.");
  logging_sample_rate_ = rate;
}

std::vector<c10d::GradBucket> TorchReducer::zero_buckets() const {
  const auto* built_in =
      dynamic_cast<const DeclaresWireFormat*>(options_.reducer.comm_hook.get());
  const std::vector<std::vector<size_t>> all = buckets();
  std::vector<c10d::GradBucket> zeros;
  for (size_t b = 0; b < all.size(); ++b) {
    std::vector<size_t> offsets;
    std::vector<size_t> lengths;
    std::vector<c10::IntArrayRef> sizes;
    std::vector<at::Tensor> members;
    size_t numel = 0;
    for (const size_t i : all[b]) {
      const at::Tensor& parameter = parameters_[i];
      offsets.push_back(numel);
      lengths.push_back(static_cast<size_t>(parameter.numel()));
      sizes.push_back(parameter.sizes());
      members.push_back(parameter);
      numel += lengths.back();
    }
    if (numel == 0) continue;
    at::TensorOptions options = members.front().options();
    if (built_in != nullptr) {
      options = options.dtype(
          built_in->wire_format(members.front().scalar_type()).dtype);
    }
    zeros.emplace_back(
        b, all.size(),
        at::zeros({static_cast<int64_t>(numel)}, options.requires_grad(false)),
        std::move(offsets), std::move(lengths), std::move(sizes),
        std::move(members), std::nullopt);
  }
  return zeros;
}

ReducerStatistics TorchReducer::statistics() const {
  return reducer_ ? reducer_->statistics() : ReducerStatistics{};
}

std::vector<std::vector<size_t>> TorchReducer::buckets() const {
  if (!reducer_) return {};
  return reducer_->plan().buckets();
}

std::vector<int64_t> TorchReducer::bucket_sizes_bytes() const {
  std::vector<int64_t> sizes;
  for (const std::vector<size_t>& bucket : buckets()) {
    int64_t bytes = 0;
    for (const size_t i : bucket) {
      bytes += static_cast<int64_t>(parameters_[i].nbytes());
    }
    sizes.push_back(bytes);
  }
  return sizes;
}

void TorchReducer::remember_errors(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    last_error_ = error.what_without_backtrace();
    throw;
  } catch (const std::exception& error) {
    last_error_ = error.what();
    throw;
  }
}

}  // namespace brigade
