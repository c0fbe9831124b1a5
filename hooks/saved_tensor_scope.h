// Default saved tensor hooks of C++, for the tensors that autograd saves on
// this thread.
//
// LibTorch's own default hooks are Python objects. Autograd asks its default
// engine for them: the first scope puts an engine in its place, for good, that
// passes everything else on.
//
// Thread safety: a scope concerns its own thread.

#ifndef BRIGADE_HOOKS_SAVED_TENSOR_SCOPE_H_
#define BRIGADE_HOOKS_SAVED_TENSOR_SCOPE_H_

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <cstddef>
#include <functional>
#include <memory>

namespace brigade {

// While it lives, `make_hooks` is asked for the hooks of each saved tensor.
// Scopes nest; the inner one decides, and so do Python's hooks pushed inside.
class SavedTensorScope {
 public:
  using MakeHooks =
      std::function<std::unique_ptr<torch::autograd::SavedVariableHooks>()>;

  explicit SavedTensorScope(MakeHooks make_hooks);
  ~SavedTensorScope();

  // Of the scope around this one; null if there is none.
  std::unique_ptr<torch::autograd::SavedVariableHooks> outer_hooks() const {
    return outer_ == nullptr ? nullptr : outer_->make_hooks_();
  }

  SavedTensorScope(const SavedTensorScope&) = delete;
  SavedTensorScope& operator=(const SavedTensorScope&) = delete;

 private:
  friend class AskingEngine;

  const MakeHooks make_hooks_;
  const SavedTensorScope* const outer_;
  const size_t num_python_hooks_;
};

}  // namespace brigade

#endif  // BRIGADE_HOOKS_SAVED_TENSOR_SCOPE_H_
