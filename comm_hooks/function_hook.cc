#include "brigade/comm_hooks/function_hook.h"

#include <c10/util/Exception.h>

#include <utility>

#include "brigade/comm_hooks/hook_result.h"
#include "brigade/comm_hooks/hook_traits.h"

namespace brigade {
namespace {

class FunctionHook final : public c10d::CommHookInterface, public HasHookName {
 public:
  FunctionHook(CommHookFunction function, std::string name)
      : function_(std::move(function)), name_(std::move(name)) {}

  std::string hook_name() const override { return name_; }

  c10::intrusive_ptr<c10::ivalue::Future> runHook(
      c10d::GradBucket& bucket) override {
    return function_(bucket);
  }

  at::Tensor parseHookResult(const c10::IValue& result) override {
    return tensor_of_hook_result(result);
  }

 private:
  const CommHookFunction function_;
  const std::string name_;
};

}  // namespace

std::shared_ptr<c10d::CommHookInterface> make_comm_hook(
    CommHookFunction function, std::string name) {
  TORCH_CHECK_VALUE(function, "make_comm_hook needs a function, got none");
  return std::make_shared<FunctionHook>(std::move(function), std::move(name));
}

}  // namespace brigade
