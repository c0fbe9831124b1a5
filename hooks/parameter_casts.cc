#include "brigade/hooks/parameter_casts.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace brigade {
namespace {

thread_local std::shared_ptr<const ParameterCasts> innermost;

bool can_be_cast(const at::Tensor& parameter, at::ScalarType dtype) {
  return parameter.defined() && parameter.is_leaf() &&
         parameter.layout() == at::kStrided && parameter.has_storage() &&
         parameter.is_floating_point() && parameter.scalar_type() != dtype;
}

int64_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : tensor._version();
}

// Keeps what autograd knows of `tensor`, and its version.
void hold(const at::Tensor& tensor, const at::Tensor& data) {
  tensor.unsafeGetTensorImpl()->shallow_copy_from(data.getIntrusivePtr());
}

}  // namespace

// Keeps what a tensor's data is now.
class ParameterCasts::AliasHooks final
    : public torch::autograd::SavedVariableHooks {
 public:
  // REQUIRES: `casts` outlive the call of the pack hook.
  explicit AliasHooks(const ParameterCasts& casts) : casts_(casts) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    alias_ = tensor.detach();
    // A copy has the version of its parameter, and will not change with it.
    if (!casts_.is_copy(alias_)) version_ = version_of(alias_);
  }

  at::Tensor call_unpack_hook() override {
    TORCH_CHECK(!version_ || version_of(alias_) == *version_,
                "A tensor that backward needs, ", alias_.scalar_type(), " ",
                alias_.sizes(), ", was changed in place: expected version ",
                *version_, ", found ", version_of(alias_),
                ".\nUse the operation that is not in place, or change a "
                "clone.");
    return alias_;
  }

 private:
  const ParameterCasts& casts_;
  at::Tensor alias_;
  std::optional<int64_t> version_;  // unset: not checked
};

ParameterCasts::ParameterCasts(std::span<const at::Tensor> parameters,
                               at::ScalarType dtype, Checkpoints checkpoints)
    : checkpoints_(checkpoints) {
  const c10::InferenceMode no_inference(false);
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> full;
  std::vector<at::Tensor> low;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& parameter = parameters[i];
    if (!can_be_cast(parameter, dtype)) continue;
    full.push_back(parameter);
    low.push_back(at::empty_like(parameter, parameter.options().dtype(dtype)));
    casts_.push_back({.place = i, .parameter = parameter, .low = low.back()});
    storages_.insert(low.back().storage().unsafeGetStorageImpl());
  }
  if (!low.empty()) at::_foreach_copy_(low, full);
}

std::shared_ptr<const ParameterCasts> ParameterCasts::current() {
  return innermost;
}

std::shared_ptr<const ParameterCasts> ParameterCasts::current_for_checkpoint() {
  TORCH_CHECK(!innermost || innermost->checkpoints_ == Checkpoints::kAllowed,
              "checkpoint: this forward runs in mixed precision, and an "
              "optimizer steps its parameters in backward; running the "
              "function again then would need both their values.\nLeave out "
              "the checkpoint, mixed_precision or step_in_backward.");
  return innermost;
}

bool ParameterCasts::is_copy(const at::Tensor& tensor) const {
  return tensor.has_storage() &&
         storages_.contains(tensor.storage().unsafeGetStorageImpl());
}

ParameterCasts::Scope::Scope(std::shared_ptr<const ParameterCasts> casts)
    : outer_(innermost) {
  if (!casts) return;
  lowered_.reserve(casts->casts_.size());
  for (const Cast& cast : casts->casts_) {
    const at::Tensor& parameter = cast.parameter;
    std::shared_ptr<torch::autograd::Node> accumulator;
    if (parameter.requires_grad()) {
      accumulator = torch::autograd::impl::grad_accumulator(parameter);
    }
    lowered_.push_back({.place = cast.place,
                        .parameter = parameter,
                        .full = parameter.variable_data(),
                        .low = cast.low,
                        .version = version_of(parameter),
                        .accumulator = std::move(accumulator)});
  }
  saved_tensors_.emplace(
      [&casts = *casts] { return std::make_unique<AliasHooks>(casts); });
  for (const Lowered& lowered : lowered_) hold(lowered.parameter, lowered.low);
  innermost = std::move(casts);
}

ParameterCasts::Scope::~Scope() {
  for (const Lowered& lowered : lowered_) hold(lowered.parameter, lowered.full);
  innermost = outer_;
}

std::optional<size_t> ParameterCasts::Scope::first_written() const {
  for (const Lowered& lowered : lowered_) {
    if (version_of(lowered.parameter) != lowered.version ||
        !lowered.parameter.is_alias_of(lowered.low)) {
      return lowered.place;
    }
  }
  return std::nullopt;
}

}  // namespace brigade
