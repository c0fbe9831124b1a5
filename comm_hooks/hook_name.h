// What a comm hook is called in messages, and compared by across ranks.
//
// Thread safety: pure.

#ifndef BRIGADE_COMM_HOOKS_HOOK_NAME_H_
#define BRIGADE_COMM_HOOKS_HOOK_NAME_H_

#include <string>
#include <torch/csrc/distributed/c10d/comm.hpp>

namespace brigade {

class HasHookName {
 public:
  // Equal on all ranks.
  virtual std::string hook_name() const = 0;

 protected:
  ~HasHookName() = default;
};

// Empty: it has none.
inline std::string name_of(const c10d::CommHookInterface& hook) {
  const auto* named = dynamic_cast<const HasHookName*>(&hook);
  return named == nullptr ? "" : named->hook_name();
}

}  // namespace brigade

#endif  // BRIGADE_COMM_HOOKS_HOOK_NAME_H_
