#include "brigade/hooks/parameter_casts.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <mutex>
#include <ranges>
#include <utility>

namespace brigade {
namespace {

thread_local std::shared_ptr<const ParameterCasts> innermost;

// Held while parameters' data is replaced, so that a second thread sees all of
// them before or after it.
std::mutex swap_mutex;

bool can_be_cast(const at::Tensor& parameter, at::ScalarType dtype) {
  return parameter.defined() && parameter.is_leaf() &&
         parameter.layout() == at::kStrided && parameter.has_storage() &&
         parameter.is_floating_point() && parameter.scalar_type() != dtype;
}

int64_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : tensor._version();
}

// Replaces the data of `parameter`, but not its version and autograd state.
void set_data(const at::Tensor& parameter, const at::Tensor& data) {
  parameter.unsafeGetTensorImpl()->shallow_copy_from(data.getIntrusivePtr());
}

}  // namespace

// Saves copies without a version check. Passes other tensors to the outer
// hooks; without these, saves them and checks their version as autograd does.
class ParameterCasts::SaveCopies final
    : public torch::autograd::SavedVariableHooks {
 public:
  // REQUIRES: `casts` outlives the call of the pack hook.
  SaveCopies(const ParameterCasts& casts,
             std::unique_ptr<SavedVariableHooks> outer)
      : casts_(&casts), outer_(std::move(outer)) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    const bool is_copy = std::exchange(casts_, nullptr)->is_copy(tensor);
    if (is_copy) outer_ = nullptr;
    if (outer_) return outer_->call_pack_hook(tensor);
    tensor_ = tensor.detach();
    // A copy has its parameter's version, which may change without the copy.
    if (!is_copy) version_ = version_of(tensor_);
  }

  at::Tensor call_unpack_hook() override {
    if (outer_) return outer_->call_unpack_hook();
    TORCH_CHECK(!version_ || version_of(tensor_) == *version_,
                "mixed_precision: a tensor that backward needs, ",
                tensor_.scalar_type(), " ", tensor_.sizes(),
                ", was changed in place: expected version ", *version_,
                ", found ", version_of(tensor_),
                ".\nUse the out-of-place operation, or change a clone.");
    return tensor_;
  }

 private:
  const ParameterCasts* casts_;  // null once packed
  std::unique_ptr<SavedVariableHooks> outer_;
  at::Tensor tensor_;
  std::optional<int64_t> version_;  // unset: not checked
};

ParameterCasts::ParameterCasts(std::span<const at::Tensor> parameters,
                               at::ScalarType dtype, Checkpoints checkpoints)
    : outer_(innermost), checkpoints_(checkpoints) {
  const c10::InferenceMode no_inference(false);
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> originals;
  std::vector<at::Tensor> copies;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& parameter = parameters[i];
    if (!can_be_cast(parameter, dtype)) continue;
    originals.push_back(parameter);
    copies.push_back(
        at::empty_like(parameter, parameter.options().dtype(dtype)));
    casts_.push_back({.index = i,
                      .parameter = parameter,
                      .dtype = parameter.scalar_type(),
                      .copy = copies.back()});
    storages_.insert(copies.back().storage().unsafeGetStorageImpl());
  }
  if (!copies.empty()) at::_foreach_copy_(copies, originals);
}

std::shared_ptr<const ParameterCasts> ParameterCasts::current() {
  for (const ParameterCasts* casts = innermost.get(); casts != nullptr;
       casts = casts->outer_.get()) {
    TORCH_CHECK(
        casts->checkpoints_ == Checkpoints::kAllowed,
        "checkpoint: this forward uses mixed_precision, and other threads may "
        "use its parameters during recomputation: an optimizer steps in "
        "backward, or the parameters are on several devices.\nRemove the "
        "checkpoint, mixed_precision or step_in_backward.");
  }
  return innermost;
}

bool ParameterCasts::is_copy(const at::Tensor& tensor) const {
  return tensor.has_storage() &&
         storages_.contains(tensor.storage().unsafeGetStorageImpl());
}

ParameterCasts::Scope::Scope(std::shared_ptr<const ParameterCasts> casts)
    : previous_(innermost), casts_(std::move(casts)) {
  if (casts_ == previous_) return;
  TORCH_CHECK(!previous_ || (casts_ && casts_->outer_ == previous_),
              "checkpoint: expected recomputation in a backward outside of "
              "mixed-precision forwards, found it in a backward inside of "
              "another forward.\nRun backward outside of that forward.");
  TORCH_CHECK(at::SavedTensorDefaultHooks::is_enabled(),
              "mixed_precision: needs saved tensor hooks, which are disabled "
              "on this thread.\nRun this forward in full precision, or enable "
              "them.");
  saved_tensors_.emplace([this] {
    return std::make_unique<SaveCopies>(*casts_, saved_tensors_->outer_hooks());
  });
  try {
    enter(*casts_);
  } catch (...) {
    leave();
    throw;
  }
  innermost = casts_;
}

ParameterCasts::Scope::~Scope() {
  if (casts_ == previous_) return;
  leave();
  innermost = previous_;
}

void ParameterCasts::Scope::enter(const ParameterCasts& casts) {
  if (casts.outer_ && casts.outer_ != previous_) enter(*casts.outer_);
  const std::lock_guard<std::mutex> lock(swap_mutex);
  for (const Cast& cast : casts.casts_) {
    const at::Tensor& parameter = cast.parameter;
    TORCH_CHECK(parameter.scalar_type() == cast.dtype,
                "mixed_precision: expected a parameter of shape ",
                parameter.sizes(), " in ", cast.dtype, ", found it in ",
                parameter.scalar_type(),
                ": it was converted, or is in use on another thread.\nUse the "
                "module on one thread at a time.");
    const bool requires_grad = parameter.requires_grad();
    replaced_.push_back(
        {.cast = &cast,
         .data = parameter.variable_data(),
         .version = version_of(parameter),
         .requires_grad = requires_grad,
         .accumulator = requires_grad
                            ? torch::autograd::impl::grad_accumulator(parameter)
                            : nullptr});
    set_data(parameter, cast.copy);
  }
}

void ParameterCasts::Scope::leave() noexcept {
  const std::lock_guard<std::mutex> lock(swap_mutex);
  for (const Replaced& replaced : replaced_ | std::views::reverse) {
    set_data(replaced.cast->parameter, replaced.data);
  }
}

std::optional<size_t> ParameterCasts::Scope::first_changed() const {
  const auto changed =
      std::ranges::find_if(replaced_, [](const Replaced& replaced) {
        const at::Tensor& parameter = replaced.cast->parameter;
        return version_of(parameter) != replaced.version ||
               parameter.requires_grad() != replaced.requires_grad ||
               !parameter.is_alias_of(replaced.cast->copy);
      });
  if (changed == replaced_.end()) return std::nullopt;
  return changed->cast->index;
}

}  // namespace brigade
