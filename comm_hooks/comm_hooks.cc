#include "brigade/comm_hooks/comm_hooks.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/Type.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/comm/errors/error_texts.h"
#include "brigade/comm/group/group_collectives.h"
#include "brigade/comm/ordered/host_sums.h"
#include "brigade/comm/streams/streams.h"
#include "brigade/comm_hooks/hook_traits.h"

namespace brigade {
namespace {

// Runs on the current stream.
OrderedAllReduce::FuturePtr reduce_on_device(c10d::ProcessGroup& group,
                                             const at::Tensor& tensor,
                                             double scale) {
  const at::NoGradGuard no_grad;
  const at::Tensor flat =
      (tensor.is_complex() ? at::view_as_real(tensor) : tensor).view(-1);
  const int size = group.getSize();
  if (size == 1) {
    flat.mul_(scale);
    return completed_future({tensor});
  }
  if (flat.numel() == 0) return completed_future({tensor});

  const int64_t slice_numel = (flat.numel() + size - 1) / size;
  const bool is_even = slice_numel * size == flat.numel();
  // Allocates before any launch: an out-of-memory error leaves no collective
  // half done.
  const at::Tensor whole =
      is_even ? flat : at::zeros({slice_numel * size}, flat.options());
  const at::Tensor terms = at::empty_like(whole);
  const at::Tensor own = at::empty({slice_numel}, flat.options());
  const at::Tensor sum = empty_sum(slice_numel, terms);

  if (!is_even) whole.narrow(0, 0, flat.numel()).copy_(flat);
  wait_on_current_stream(all_to_all_into(group, terms, whole));
  sum_in_order(terms, size, sum);
  if (scale != 1) sum.mul_(scale);
  own.copy_(sum);
  wait_on_current_stream(all_gather_into(group, whole, own));
  if (!is_even) flat.copy_(whole.narrow(0, 0, flat.numel()));
  return completed_future({tensor});
}

using c10::ivalue::Future;
using std::chrono::milliseconds;

class FunctionHook final : public c10d::CommHookInterface,
                           public CommHookExtension {
 public:
  FunctionHook(CommHookFunction function, std::string name)
      : function_(std::move(function)), name_(std::move(name)) {}

  HookTraits traits() const override { return {.name = name_}; }

  HookFuturePtr runHook(c10d::GradBucket& bucket) override {
    return function_(bucket);
  }

  at::Tensor parseHookResult(const c10::IValue& result) override {
    return tensor_of_hook_result(result);
  }

 private:
  const CommHookFunction function_;
  const std::string name_;
};

// The hook may return a complex bucket as pairs of reals.
at::Tensor flat_result(const at::Tensor& result, const at::Tensor& parameter) {
  const at::Tensor flat = result.reshape({-1}).contiguous();
  if (!parameter.is_complex() || flat.is_complex()) return flat;
  return at::view_as_complex(flat.reshape({-1, 2}));
}

void step_all(const at::Tensor& result,
              const std::vector<at::Tensor>& parameters,
              const ParameterStep& step) {
  const at::NoGradGuard no_grad;
  const bool sparse = result.layout() != at::kStrided;
  const at::Tensor flat =
      sparse ? result : flat_result(result, parameters.front());
  int64_t offset = sparse ? 0 : flat.storage_offset();
  for (const at::Tensor& parameter : parameters) {
    at::DimVector strides;
    const at::Tensor gradient =
        sparse ? result
               : flat.as_strided(parameter.sizes(),
                                 gradient_strides(parameter, strides), offset);
    offset += parameter.numel();
    parameter.mutable_grad() = gradient.to(parameter.scalar_type());
    const auto free_gradient = c10::make_scope_exit(
        [&parameter] { parameter.mutable_grad().reset(); });
    step(parameter);
  }
}

// Returns None, or the text of an error. An error in the future itself would
// count as a network failure.
c10::IValue error_of_steps(const std::weak_ptr<c10d::CommHookInterface>& weak,
                           const c10::IValue& reduced,
                           const std::vector<at::Tensor>& parameters,
                           const ParameterStep& step) {
  try {
    const std::shared_ptr<c10d::CommHookInterface> hook = weak.lock();
    TORCH_CHECK(hook, "the comm hook was destroyed");
    const at::Tensor result = hook->parseHookResult(reduced);
    if (result.defined()) step_all(result, parameters, step);
    return {};
  } catch (...) {
    return message_of(std::current_exception());
  }
}

std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages_of(
    const std::vector<at::Tensor>& tensors) {
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages;
  for (const at::Tensor& tensor : tensors) {
    storages.push_back(tensor.storage().getWeakStorageImpl());
  }
  return storages;
}

class SteppingHook final : public WrappingHook {
 public:
  SteppingHook(CommHookPtr hook, ParameterStep step, ParameterFilter is_stepped)
      : WrappingHook(std::move(hook)),
        step_(std::move(step)),
        is_stepped_(std::move(is_stepped)) {}

  HookFuturePtr runHook(c10d::GradBucket& bucket) override {
    const bool steps = steps_parameters_of(bucket);
    const HookFuturePtr reduced = hook_->runHook(bucket);
    if (!reduced || !has_data_ || !steps) return reduced;
    // The value names the parameters' storages, so that a wait for the future
    // includes the steps' writes. The reference to the hook is weak: the hook
    // may own a group, which would end on its own thread.
    return reduced->then(
        [hook = std::weak_ptr(hook_), step = step_,
         parameters = bucket.getParameters()](Future& done) {
          c10::IValue error =
              error_of_steps(hook, done.value(), parameters, step);
          return std::tuple(std::move(error), storages_of(parameters));
        },
        c10::AnyType::get());
  }

  at::Tensor parseHookResult(const c10::IValue& result) override {
    TORCH_CHECK(!result.isString(),
                "step_in_backward: a step threw: ", result.toStringRef());
    return result.isNone() ? at::Tensor() : hook_->parseHookResult(result);
  }

  HookTraits traits() const override {
    HookTraits traits = WrappingHook::traits();
    traits.takes_host_sums = traits_.takes_host_sums;
    traits.steps_parameters = true;
    return traits;
  }

  void take_host_sums(std::shared_ptr<HostSums> sums) override {
    traits_.host_sums->take_host_sums(std::move(sums));
  }

  void iteration_begins(bool has_data) override {
    has_data_ = has_data;
    WrappingHook::iteration_begins(has_data);
  }

 private:
  bool steps_parameters_of(const c10d::GradBucket& bucket) const {
    if (!is_stepped_) return true;
    const std::vector<at::Tensor> parameters = bucket.getParameters();
    const bool steps = is_stepped_(parameters.front());
    TORCH_CHECK(std::ranges::all_of(parameters,
                                    [&](const at::Tensor& parameter) {
                                      return is_stepped_(parameter) == steps;
                                    }),
                "step_in_backward: bucket ", bucket.getIndex(),
                " holds parameters with and without a step.\nSet a bucket_plan "
                "that separates them.");
    return steps;
  }

  const ParameterStep step_;
  const ParameterFilter is_stepped_;  // null: all are
  bool has_data_ = true;  // false: a joined rank gets the model at the end
};

thread_local ChainedCollectives* current = nullptr;

void complete_with(const HookFuturePtr& result, const HookFuturePtr& second) {
  second->addCallback([result](Future& done) {
    if (done.hasError()) {
      result->setError(done.exception_ptr());
    } else {
      result->markCompleted(done.value(), done.storages());
    }
  });
}

std::atomic<int64_t> num_seen = 0;

// LibTorch's thread name.
constexpr std::string_view kGlooThread = "pt_gloo_runloop";
constexpr std::string_view kCollectives = "c10d::";

bool is_on_gloo_thread() {
  char name[16] = {};  // the system's limit
  pthread_getname_np(pthread_self(), name, sizeof(name));
  return std::string_view(name) == kGlooThread.substr(0, sizeof(name) - 1);
}

std::unique_ptr<at::ObserverContext> count_collective(
    const at::RecordFunction& call) {
  if (std::string_view(call.name()).starts_with(kCollectives) &&
      is_on_gloo_thread()) {
    ++num_seen;
  }
  return nullptr;
}

}  // namespace

// ---- Properties.

at::ScalarType HookTraits::wire_dtype(at::ScalarType gradient_dtype) const {
  return wire_format == nullptr
             ? gradient_dtype
             : wire_format->wire_format(gradient_dtype).dtype;
}

HookTraits traits_of(c10d::CommHookInterface& hook) {
  auto* const extension = dynamic_cast<CommHookExtension*>(&hook);
  HookTraits traits = extension == nullptr ? HookTraits() : extension->traits();
  traits.hook = &hook;
  traits.wire_format = traits.declares_wire_format ? extension : nullptr;
  traits.listener = extension;
  traits.host_sums = traits.takes_host_sums ? extension : nullptr;
  return traits;
}

std::string describe(const HookTraits& hook) {
  return hook.name.empty() ? "the comm hook"
                           : absl::StrCat("comm hook ", hook.name);
}

HookTraits WrappingHook::traits() const {
  HookTraits traits = traits_;
  traits.declares_wire_format = true;
  traits.takes_host_sums = false;
  traits.releases_buffer = false;
  return traits;
}

WireFormat WrappingHook::wire_format(at::ScalarType gradient_dtype) const {
  return traits_.wire_format == nullptr
             ? WireFormat{.dtype = gradient_dtype}
             : traits_.wire_format->wire_format(gradient_dtype);
}

at::IntArrayRef gradient_strides(const at::Tensor& parameter,
                                 at::DimVector& storage) {
  if (parameter.is_non_overlapping_and_dense()) return parameter.strides();
  const at::IntArrayRef sizes = parameter.sizes();
  storage.assign(sizes.size(), 1);
  for (auto d = static_cast<int64_t>(sizes.size()) - 2; d >= 0; --d) {
    storage[d] = storage[d + 1] * std::max<int64_t>(sizes[d + 1], 1);
  }
  return storage;
}

at::Tensor tensor_of_hook_result(const c10::IValue& result) {
  if (result.isNone()) return {};
  std::vector<at::Tensor> tensors;
  if (result.isTensor()) {
    tensors = {result.toTensor()};
  } else if (result.isTensorList()) {
    tensors = result.toTensorVector();
  } else if (result.isPyObject()) {  // of a process group written in Python
    tensors = result.toPyObjectHolder()->extractTensors();
  } else {
    TORCH_CHECK_TYPE(false, "a comm hook's future: expected a tensor, found ",
                     result.tagKind(),
                     ".\nReturn a future of the reduced bucket.");
  }
  TORCH_CHECK_TYPE(tensors.size() == 1 && tensors.front().defined(),
                   "a comm hook's future: expected one tensor, found ",
                   tensors.size() == 1
                       ? "an undefined one"
                       : absl::StrCat(tensors.size(), " tensors"),
                   ".\nReturn a future of the reduced bucket.");
  return tensors.front();
}

// ---- Sums in rank order.

void OrderedAllReduce::connect() { collectives_.emplace(group_.lock()); }

void OrderedAllReduce::connect_for(std::span<const at::Tensor> tensors) {
  if (std::ranges::any_of(tensors, &at::Tensor::is_cpu)) connect();
}

OrderedAllReduce::FuturePtr OrderedAllReduce::run(const at::Tensor& tensor,
                                                  double scale) {
  if (tensor.is_cpu()) {
    if (!collectives_) connect();
    return collectives_->all_reduce(tensor, scale);
  }
  const c10::Device device = tensor.device();
  auto stream = streams_.find(device.index());
  if (stream == streams_.end()) {
    stream = streams_.emplace(device.index(), side_stream(device)).first;
  }
  c10::Event launch(device.type());
  launch.record(current_stream(device));
  tensor.record_stream(stream->second);
  const c10::StreamGuard on_stream(stream->second);
  // Orders the side stream after the tensor's writer.
  launch.block(stream->second);
  return reduce_on_device(*group_.lock(), tensor, scale);
}

// ---- Averages.

AveragingHook::AveragingHook(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    std::optional<at::ScalarType> wire_dtype,
    std::shared_ptr<OrderedAllReduce> ordered, bool takes_host_sums)
    : group_(group, "a comm hook"),
      wire_dtype_(wire_dtype),
      ordered_(std::move(ordered)),
      takes_host_sums_(takes_host_sums),
      divisor_(group_.size()) {}

void AveragingHook::divide_by_world_size() {
  next_divisor_ = nullptr;
  divisor_ = group_.size();
}

void AveragingHook::divide_by(std::function<double()> divisor) {
  next_divisor_ = std::move(divisor);
}

double AveragingHook::divisor() const {
  if (next_divisor_) {
    divisor_ = next_divisor_();
    next_divisor_ = nullptr;
  }
  return divisor_;
}

c10::intrusive_ptr<c10::ivalue::Future> AveragingHook::runHook(
    c10d::GradBucket& bucket) {
  const at::Tensor& buffer = bucket.getBuffer();
  const at::Tensor reals =
      buffer.is_complex() ? at::view_as_real(buffer) : buffer;
  if (ordered_) return ordered_->run(reals, 1.0 / divisor());
  if (host_sums_ && HostSums::can_reduce(reals)) {
    return host_sums_->all_reduce(reals);
  }
  std::vector<at::Tensor> tensors = {reals};
  return future_of(group_.lock()->allreduce(tensors), buffer);
}

at::Tensor AveragingHook::parseHookResult(const c10::IValue& result) {
  return tensor_of_hook_result(result);
}

WireFormat AveragingHook::wire_format(at::ScalarType gradient_dtype) const {
  const bool compress =
      wire_dtype_.has_value() && c10::isFloatingType(gradient_dtype) &&
      c10::elementSize(gradient_dtype) > c10::elementSize(*wire_dtype_);
  return {.dtype = compress ? *wire_dtype_ : gradient_dtype,
          .scale = ordered_ ? 1.0 : 1.0 / divisor()};
}

CommHookPtr all_reduce_hook(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  return std::make_shared<AveragingHook>(group);
}

CommHookPtr fp16_hook(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  return std::make_shared<AveragingHook>(group, at::kHalf);
}

CommHookPtr bf16_hook(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  return std::make_shared<AveragingHook>(group, at::kBFloat16);
}

CommHookPtr ordered_hook(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  auto ordered = std::make_shared<OrderedAllReduce>(group);
  ordered->connect();
  return std::make_shared<AveragingHook>(group, std::nullopt,
                                         std::move(ordered));
}

std::shared_ptr<AveragingHook> default_hook(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    std::optional<at::ScalarType> wire_dtype,
    std::shared_ptr<OrderedAllReduce> ordered) {
  return std::make_shared<AveragingHook>(group, wire_dtype, std::move(ordered),
                                         /*takes_host_sums=*/true);
}

// ---- A hook made of a function.

CommHookPtr make_comm_hook(CommHookFunction function, std::string name) {
  TORCH_CHECK_VALUE(function, "make_comm_hook: the function is empty.");
  if (name.empty()) name = c10::demangle(function.target_type().name());
  return std::make_shared<FunctionHook>(std::move(function), std::move(name));
}

// ---- Second collectives of a hook.

ChainedCollectives::Scope::Scope(ChainedCollectives& collectives)
    : before_(std::exchange(current, &collectives)) {}

ChainedCollectives::Scope::~Scope() { current = before_; }

HookFuturePtr then_collective(HookFuturePtr first, NextCollective next) {
  TORCH_CHECK_VALUE(first && next,
                    "then_collective: expected a future and a function, found "
                    "null or an empty function.");
  if (current == nullptr) {
    first->waitAndThrow();
    return next(first->value());
  }
  auto result =
      c10::make_intrusive<Future>(c10::AnyType::get(), first->devices());
  current->chains_.push_back(
      {.first = std::move(first), .next = std::move(next), .result = result});
  return result;
}

void ChainedCollectives::launch(
    milliseconds timeout,
    const std::function<void(const std::function<void()>&)>& count) {
  auto chains = std::exchange(chains_, {});
  for (size_t i = 0; i < chains.size(); ++i) {
    const Chain& chain = chains[i];
    try {
      TORCH_CHECK(
          wait_for(*chain.first, timeout),
          "then_collective: the first collective's future was not complete "
          "within ",
          timeout.count() / 1000.0,
          " s, the group's timeout.\nComplete it on every rank.");
      chain.first->wait();
      if (chain.first->hasError()) {
        chain.result->setError(chain.first->exception_ptr());
        continue;
      }
      count([&] {
        HookFuturePtr second = chain.next(chain.first->value());
        TORCH_CHECK(second,
                    "then_collective: expected the function to return the "
                    "second collective's future, found null.");
        complete_with(chain.result, second);
      });
    } catch (...) {
      chains_.assign(chains.begin() + static_cast<std::ptrdiff_t>(i),
                     chains.end());
      cancel(milliseconds(0));
      throw;
    }
  }
}

void ChainedCollectives::cancel(milliseconds timeout) {
  for (const Chain& chain : std::exchange(chains_, {})) {
    wait_for(*chain.first, timeout);
    chain.result->setErrorIfNeeded(std::make_exception_ptr(std::runtime_error(
        "the collective was not launched: its iteration was aborted")));
  }
}

ContinuationWatch::ContinuationWatch()
    : seen_before_(num_seen),
      handle_(at::addGlobalCallback(at::RecordFunctionCallback(count_collective)
                                        .scopes({at::RecordScope::FUNCTION}))) {
}

ContinuationWatch::~ContinuationWatch() { at::removeCallback(handle_); }

bool ContinuationWatch::has_seen_any() const {
  return num_seen != seen_before_;
}

// ---- An optimizer that steps in backward.

CommHookPtr step_in_backward(CommHookPtr hook, ParameterStep step,
                             ParameterFilter is_stepped) {
  TORCH_CHECK_VALUE(hook,
                    "step_in_backward: the comm hook is null.\nPass "
                    "all_reduce_hook(group).");
  TORCH_CHECK_VALUE(step, "step_in_backward: the step is empty.");
  return std::make_shared<SteppingHook>(std::move(hook), std::move(step),
                                        std::move(is_stepped));
}

}  // namespace brigade
