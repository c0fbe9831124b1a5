#include "brigade/fsdp/unit_reduction.h"

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
  const ShardingStreams::Scope on_sums = transport_.streams().for_sums();
  const at::Tensor whole = segment_.finish_gradients(memory_);
  auto future = transport_.reduce_scatter(
      whole, segment_.pending(),
      {.scale = scale(), .over_replicas = sums_over_replicas_});
  memory_.release_behind(segment_.take_finished_gradients(), future);
  return future;
}

void UnitReduction::commit(const std::vector<char>& is_used) {
  if (!sums_over_replicas_) return segment_.keep_partial();
  segment_.commit(is_used, transport_.scales() ? 1 : scale());
}

c10::intrusive_ptr<c10::ivalue::Future> UnitReduction::launch_substitute() {
  memory_.release(segment_.take_gradient_memory());
  segment_.drop_partial();
  return launch();
}

std::string UnitReduction::describe() const {
  return absl::StrCat("reduction ", index_, " (unit '", unit_.name,
                      "', from parameter '", segment_.parameters().front().name,
                      "' on)");
}

}  // namespace brigade
