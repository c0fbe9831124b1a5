// The thread-local state under which an entry is packed, launched and
// delivered: that of the thread that prepared the backward (profilers, dispatch
// modes), but gradients are not recorded and autocast is off, whatever forward
// ran under.
//
// Source: torch runs comm hooks with both off.

#ifndef BRIGADE_REDUCER_HOOK_SCOPE_H_
#define BRIGADE_REDUCER_HOOK_SCOPE_H_

#include <ATen/ThreadLocalState.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace brigade {

class HookScope {
 public:
  explicit HookScope(const at::ThreadLocalState& preparer)
      : as_preparer_(preparer), no_autocast_(c10::autocast_dispatch_keyset) {}
  HookScope(const HookScope&) = delete;
  HookScope& operator=(const HookScope&) = delete;

 private:
  const at::ThreadLocalStateGuard as_preparer_;
  const at::NoGradGuard no_grad_;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast_;
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_HOOK_SCOPE_H_
