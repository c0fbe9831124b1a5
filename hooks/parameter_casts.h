// Mixed precision: copies of parameters in a lower precision, which replace the
// parameters' data during a forward.
//
// While a Scope lives, the parameters hold the copies. Autograd saves the
// copies, so backward computes gradients at their values even if the parameters
// change in between. A gradient is cast to the parameter's own precision before
// accumulation over several uses. checkpoint() runs its function again with the
// same copies.
//
// Limits:
// - A write to a parameter inside a scope is lost; see first_changed(). Views
//   of a parameter created inside a scope are views of the copy.
// - Only tensors that the scope's thread saves refer to the copies. Other
//   threads, and functions that store a parameter without saving it, use the
//   parameter itself in backward.
// - Copies belong to the stream that is current at construction.
//
// Thread safety: use the parameters on one thread at a time.

#ifndef BRIGADE_HOOKS_PARAMETER_CASTS_H_
#define BRIGADE_HOOKS_PARAMETER_CASTS_H_

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <unordered_set>
#include <vector>

#include "brigade/hooks/autograd_hooks.h"

namespace brigade {

class ParameterCasts {
 public:
  enum class Checkpoints {
    kAllowed,
    kRefused,  // other threads may use the parameters during backward
  };

  // Copies those of `parameters` that are dense floating-point leaves of
  // another dtype than `dtype`. REQUIRES: each parameter is listed once.
  ParameterCasts(std::span<const at::Tensor> parameters, at::ScalarType dtype,
                 Checkpoints checkpoints = Checkpoints::kAllowed);

  // Returns the casts of the innermost scope on this thread, for use in
  // backward; null if there is none.
  //
  // Errors: RuntimeError if checkpoints are refused.
  static std::shared_ptr<const ParameterCasts> current();

  class Scope {
   public:
    // Applies `casts`, and the casts that were current when `casts` was
    // constructed. Null is valid outside of other scopes.
    //
    // Errors: RuntimeError inside a scope that `casts` was not constructed in,
    // if a parameter is not in its own precision, or if saved tensor hooks are
    // disabled.
    explicit Scope(std::shared_ptr<const ParameterCasts> casts);
    ~Scope();

    // Returns the index, in the list that `casts` was constructed with, of the
    // first parameter that was written, frozen or unfrozen inside this scope.
    // Ignores parameters that were not cast.
    std::optional<size_t> first_changed() const;

    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    struct Replaced;

    void enter(const ParameterCasts& casts);
    void leave() noexcept;

    const std::shared_ptr<const ParameterCasts> previous_;
    const std::shared_ptr<const ParameterCasts> casts_;
    std::vector<Replaced> replaced_;  // in the order of enter()
    std::optional<SavedTensorScope> saved_tensors_;
  };

 private:
  class SaveCopies;

  struct Cast {
    size_t index;
    at::Tensor parameter;
    at::ScalarType dtype;  // the parameter's own
    at::Tensor copy;
  };

  bool is_copy(const at::Tensor& tensor) const;

  const std::shared_ptr<const ParameterCasts> outer_;
  const Checkpoints checkpoints_;
  std::vector<Cast> casts_;
  std::unordered_set<const c10::StorageImpl*> storages_;  // of the copies
};

struct ParameterCasts::Scope::Replaced {
  const Cast* cast;
  at::Tensor data;  // the parameter's own
  int64_t version;
  bool requires_grad;
  // Created while the parameter has its own precision. Held here because
  // autograd's reference is weak. Null if the parameter is frozen.
  NodePtr accumulator;
};

}  // namespace brigade

#endif  // BRIGADE_HOOKS_PARAMETER_CASTS_H_
