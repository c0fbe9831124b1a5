#include "brigade/fsdp/unit_reduction.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace brigade {

UnitReduction::UnitReduction(size_t index, std::string unit_name,
                             Segment& segment, ShardTransport& transport,
                             GradientMemory& memory)
    : index_(index),
      unit_name_(std::move(unit_name)),
      segment_(segment),
      transport_(transport),
      memory_(memory) {}

double UnitReduction::scale() const {
  if (transport_.scales()) return 1;
  return 1.0 / (transport_.num_shards() * transport_.num_replicas());
}

c10::intrusive_ptr<c10::ivalue::Future> UnitReduction::launch() {
  const at::Tensor whole = segment_.finish_gradients(memory_);
  auto future = transport_.reduce_scatter(whole, segment_.pending());
  memory_.release_behind(segment_.take_gradient_memory(), future);
  return future;
}

c10::intrusive_ptr<c10::ivalue::Future> UnitReduction::launch_substitute() {
  memory_.release(segment_.take_gradient_memory());
  return launch();
}

std::string UnitReduction::describe() const {
  return absl::StrCat("reduction ", index_, " (unit '", unit_name_,
                      "', from parameter '", segment_.parameters().front().name,
                      "' on)");
}

}  // namespace brigade
