// Runs a function with parameters in a lower precision than they are kept in.
//
// While a scope lives, the parameters hold copies in that precision; before and
// after it, and so in backward, they are what they always are. Backward works
// nevertheless:
// - Autograd saves the copies, since the parameters will hold other data by
//   then. Changing a parameter before backward is allowed, therefore: gradients
//   are those at the copies' values.
// - A parameter keeps its gradient accumulator, which knows its own precision:
//   the engine casts each gradient on its way there, before gradients of
//   several uses are added up.
// - checkpoint() runs its function again with the same copies.
//
// Differs from torch.nn.parallel's native mixed precision, which leaves copies
// in place until backward is over: a second forward, an evaluation in between
// and a backward that never comes need no care here.
//
// To know:
// - What is written to a parameter inside of a scope is lost; see
//   first_written().
// - Threads other than the scope's own, and functions of the user's that keep a
//   parameter for backward by other means than saving it, get the parameter
//   itself in backward.
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

#include "brigade/hooks/saved_tensor_scope.h"

namespace brigade {

class ParameterCasts {
 public:
  enum class Checkpoints {
    kAllowed,
    kRefused,  // parameters may be in use on another thread during backward
  };

  // Casts those leaves among `parameters` that are dense, floating-point and
  // not in `dtype`.
  ParameterCasts(std::span<const at::Tensor> parameters, at::ScalarType dtype,
                 Checkpoints checkpoints = Checkpoints::kAllowed);

  // Those of the innermost scope on this thread; null if there is none.
  static std::shared_ptr<const ParameterCasts> current();

  // The same, for a scope in backward. Errors: RuntimeError if checkpoints are
  // refused.
  static std::shared_ptr<const ParameterCasts> current_for_checkpoint();

  class Scope {
   public:
    // Null: does nothing.
    explicit Scope(std::shared_ptr<const ParameterCasts> casts);
    ~Scope();

    // The place, among the parameters that were cast, of the first one that was
    // written inside of this scope.
    std::optional<size_t> first_written() const;

    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    struct Lowered {
      size_t place;
      at::Tensor parameter;
      at::Tensor full;  // its own data
      at::Tensor low;
      int64_t version;
      // Autograd holds it weakly. Null if no gradient is required.
      std::shared_ptr<torch::autograd::Node> accumulator;
    };

    const std::shared_ptr<const ParameterCasts> outer_;
    std::vector<Lowered> lowered_;
    std::optional<SavedTensorScope> saved_tensors_;
  };

 private:
  class AliasHooks;

  struct Cast {
    size_t place;
    at::Tensor parameter;
    at::Tensor low;
  };

  bool is_copy(const at::Tensor& tensor) const;

  const Checkpoints checkpoints_;
  std::vector<Cast> casts_;
  std::unordered_set<const c10::StorageImpl*> storages_;  // of the copies
};

}  // namespace brigade

#endif  // BRIGADE_HOOKS_PARAMETER_CASTS_H_
