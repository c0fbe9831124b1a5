#include "brigade/comm_hooks/function_hook.h"

#include <c10/util/Exception.h>

#include <utility>

#include "brigade/comm_hooks/hook_result.h"

namespace brigade {
namespace {

class FunctionHook final : public c10d::CommHookInterface {
 public:
  explicit FunctionHook(CommHookFunction function)
      : function_(std::move(function)) {}

  c10::intrusive_ptr<c10::ivalue::Future> runHook(
      c10d::GradBucket& bucket) override {
    return function_(bucket);
  }

  at::Tensor parseHookResult(const c10::IValue& result) override {
    return tensor_of_hook_result(result);
  }

 private:
  const CommHookFunction function_;
};

}  // namespace

std::shared_ptr<c10d::CommHookInterface> make_comm_hook(
    CommHookFunction function) {
  TORCH_CHECK_VALUE(function, "make_comm_hook needs a function, got none");
  return std::make_shared<FunctionHook>(std::move(function));
}

}  // namespace brigade
