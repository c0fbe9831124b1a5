// What a comm hook is called in messages, and compared by across ranks.
//
// Thread safety: pure.

#ifndef BRIGADE_COMM_HOOKS_HOOK_NAME_H_
#define BRIGADE_COMM_HOOKS_HOOK_NAME_H_

#include <string>

namespace brigade {

class HasHookName {
 public:
  // Equal on all ranks.
  virtual std::string hook_name() const = 0;

 protected:
  ~HasHookName() = default;
};

}  // namespace brigade

#endif  // BRIGADE_COMM_HOOKS_HOOK_NAME_H_
