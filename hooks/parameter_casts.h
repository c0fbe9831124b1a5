// Runs a function with parameters in a lower precision than they are kept in.
//
// While a scope lives, the parameters hold copies in that precision. Autograd
// saves the copies, so gradients are those at the copies' values, whatever
// happens to the parameters before backward. Gradients are cast to the
// parameter's own precision before those of several uses are added up.
// checkpoint() runs its function again with the same copies. torch's native
// mixed precision leaves copies in place until backward is over.
//
// Limits:
// - A write to a parameter inside of a scope is lost; see first_changed().
//   Views of a parameter that leave the scope are of the copy.
// - Threads other than the scope's own, and functions that keep a parameter for
//   backward by other means than saving it, get the parameter itself.
// - Copies belong to the stream that is current when they are made.
//
// Thread safety: parameters may be in use on one thread at a time.

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

#include "brigade/hooks/autograd_node.h"
#include "brigade/hooks/saved_tensor_scope.h"

namespace brigade {

class ParameterCasts {
 public:
  enum class Checkpoints {
    kAllowed,
    kRefused,  // parameters may be in use on other threads during backward
  };

  // Casts those leaves among `parameters`, each given once, that are dense,
  // floating-point and not in `dtype`.
  ParameterCasts(std::span<const at::Tensor> parameters, at::ScalarType dtype,
                 Checkpoints checkpoints = Checkpoints::kAllowed);

  // Of the innermost scope on this thread, for use in backward; null: none.
  // Errors: RuntimeError if checkpoints are refused.
  static std::shared_ptr<const ParameterCasts> current();

  class Scope {
   public:
    // Makes `casts` current, with those that were current when they were made;
    // null: none.
    //
    // Errors: RuntimeError if it would have to end an outer scope, if a
    // parameter is not in the precision that it was cast from, or if saved
    // tensor hooks are disabled.
    explicit Scope(std::shared_ptr<const ParameterCasts> casts);
    ~Scope();

    // The index, in the list given to the constructor of the casts, of the
    // first parameter that was written, frozen or unfrozen inside of this
    // scope. Those that were not cast are not looked at.
    std::optional<size_t> first_changed() const;

    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    struct Lowered;

    void enter(const ParameterCasts& casts);
    void leave() noexcept;

    const std::shared_ptr<const ParameterCasts> before_;
    const std::shared_ptr<const ParameterCasts> casts_;
    std::vector<Lowered> lowered_;  // in the order in which they were
    std::optional<SavedTensorScope> saved_tensors_;
  };

 private:
  class SaveCopies;

  struct Cast {
    size_t place;
    at::Tensor parameter;
    at::ScalarType dtype;  // its own
    at::Tensor copy;
  };

  // Whether it shares memory with one.
  bool is_copy(const at::Tensor& tensor) const;

  const std::shared_ptr<const ParameterCasts> outer_;
  const Checkpoints checkpoints_;
  std::vector<Cast> casts_;
  std::unordered_set<const c10::StorageImpl*> storages_;  // of the copies
};

struct ParameterCasts::Scope::Lowered {
  const Cast* cast;
  at::Tensor full;  // the parameter's own data
  int64_t version;
  bool requires_grad;
  // Made while the parameter was in its own precision; autograd holds it
  // weakly. Null if it requires no gradient.
  NodePtr accumulator;
};

}  // namespace brigade

#endif  // BRIGADE_HOOKS_PARAMETER_CASTS_H_
