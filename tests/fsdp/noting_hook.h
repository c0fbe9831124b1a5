// Sums as without a comm hook, and a note where each begins.

#ifndef BRIGADE_TESTS_FSDP_NOTING_HOOK_H_
#define BRIGADE_TESTS_FSDP_NOTING_HOOK_H_

#include <functional>
#include <string>
#include <utility>

#include "brigade/fsdp/units/reduction_hook.h"

namespace brigade::testing {

class NotingHook final : public ReductionHook {
 public:
  explicit NotingHook(std::function<void()> on_begin)
      : on_begin_(std::move(on_begin)) {}
  c10::intrusive_ptr<c10::ivalue::Future> reduce(
      ShardTransport& transport, const Reduction& reduction) override {
    on_begin_();
    return transport.reduce_scatter(reduction.whole, reduction.shard,
                                    reduction.sum);
  }
  std::string hook_name() const override { return "noting"; }
  bool fails_by_network_only() const override { return true; }

 private:
  const std::function<void()> on_begin_;
};

}  // namespace brigade::testing

#endif  // BRIGADE_TESTS_FSDP_NOTING_HOOK_H_
