#include "brigade/fsdp/units/unit_reduction.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <utility>

#include "absl/strings/str_cat.h"

namespace brigade {

UnitReduction::UnitReduction(size_t index, const Unit& unit, Segment& segment,
                             ShardTransport& transport, GradientMemory& memory)
    : index_(index),
      unit_(unit),
      segment_(segment),
      transport_(transport),
      memory_(memory) {}

// A sum over one row is a part of the sum that is divided.
double UnitReduction::scale() const {
  if (!sums_over_replicas_) return 1;
  return 1.0 / unit_.settings.gradient_divisor.value_or(
                   transport_.num_shards() * transport_.num_replicas());
}

c10::intrusive_ptr<c10::ivalue::Future> UnitReduction::launch() {
  segment_.prepare_sum();
  const ShardingStreams::Scope on_sums = transport_.streams().for_sums();
  const at::Tensor whole = segment_.finish_gradients(memory_);
  auto future = reduce(whole);
  memory_.release_behind(segment_.take_finished_gradients(), future);
  return future;
}

c10::intrusive_ptr<c10::ivalue::Future> UnitReduction::reduce(
    const at::Tensor& whole) {
  ReductionHook::Reduction reduction = {
      .whole = whole,
      .shard = segment_.shard_gradient().pending(),
      .sum = {.scale = scale(),
              .over_replicas = sums_over_replicas_,
              .of_row = sums_over_replicas_
                            ? segment_.shard_gradient().partial()
                            : at::Tensor()}};
  if (!unit_.comm_hook) {
    return transport_.reduce_scatter(reduction.whole, reduction.shard,
                                     reduction.sum);
  }
  if (!transport_.scales()) {  // before the hook, so that it need not know
    const at::NoGradGuard no_grad;
    const double scale = std::exchange(reduction.sum.scale, 1);
    at::Tensor& of_row = reduction.sum.of_row;
    if (scale != 1) whole.mul_(scale);
    if (scale != 1 && of_row.defined()) of_row = of_row * scale;
  }
  auto future = unit_.comm_hook->reduce(transport_, reduction);
  TORCH_CHECK(future, "fully_shard: the comm hook '",
              unit_.comm_hook->hook_name(), "' of unit '", unit_.name,
              "' returned no future.\nReturn that of its collective.");
  return future;
}

void UnitReduction::commit(const std::vector<char>& is_used) {
  if (!sums_over_replicas_) return segment_.shard_gradient().keep_partial();
  const bool is_scaled = unit_.comm_hook || transport_.scales();
  segment_.commit(is_used, is_scaled ? 1 : scale());
  segment_.shard_gradient().drop_partial();
}

c10::intrusive_ptr<c10::ivalue::Future> UnitReduction::launch_substitute() {
  memory_.release(segment_.take_gradient_memory());
  segment_.shard_gradient().drop_partial();
  return launch();
}

bool UnitReduction::fails_by_network_only() const {
  return !unit_.comm_hook || unit_.comm_hook->fails_by_network_only();
}

std::string UnitReduction::describe() const {
  return absl::StrCat("reduction ", index_, " (unit '", unit_.name,
                      "', from parameter '", segment_.parameters().front().name,
                      "' on)");
}

}  // namespace brigade
