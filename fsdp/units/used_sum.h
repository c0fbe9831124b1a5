// Which parameters any rank has used, on devices with streams: the last entry
// of each iteration's sequence.
//
// It travels behind the reductions, so that no host has to know whether ranks
// differ. Who has used all parameters itself does not read it.
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_FSDP_UNITS_USED_SUM_H_
#define BRIGADE_FSDP_UNITS_USED_SUM_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "brigade/engine/state/collective.h"
#include "brigade/fsdp/transport/shard_transport.h"

namespace brigade {

class UsedSum final : public Collective {
 public:
  // `is_used`: by parameter, what this rank has used. REQUIRES: both outlive
  // this object.
  UsedSum(std::vector<int32_t>& is_used, ShardTransport& transport)
      : is_used_(is_used), transport_(transport) {}

  // `is_used` becomes how many ranks have used each. The host waits for the
  // device, and so for peers. REQUIRES: launched. Errors: what the collective
  // throws.
  void read();

  std::optional<size_t> unit() const override { return std::nullopt; }
  size_t num_awaited() const override { return 0; }
  bool is_left_out() override { return false; }
  bool needs_pack() override { return false; }
  void pack() override {}
  c10::intrusive_ptr<c10::ivalue::Future> launch() override;
  c10::intrusive_ptr<c10::ivalue::Future> launch_substitute() override;
  at::Tensor result_of(const c10::IValue& /*value*/) override { return {}; }
  void deliver(const at::Tensor& /*result*/) override { read(); }
  c10::Device device() const override { return transport_.streams().device(); }
  bool fails_by_network_only() const override { return true; }
  std::string describe() const override {
    return "the sum of which parameters are used";
  }

 private:
  c10::intrusive_ptr<c10::ivalue::Future> launch(const at::Tensor& on_host);

  std::vector<int32_t>& is_used_;
  ShardTransport& transport_;
  at::Tensor sum_;  // int32, [parameters], of the sums' stream
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_UNITS_USED_SUM_H_
