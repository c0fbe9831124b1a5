#include "brigade/reducer/gradient_views.h"

#include <algorithm>

namespace brigade {

void GradientViews::adopt() {
  for (size_t slot = 0; slot < parameters_.size(); ++slot) {
    at::Tensor& gradient = parameters_[slot]->mutable_grad();
    // One that does not fit stays where it is; the next pack tells of it.
    if (!gradient.defined() || gradient.requires_grad() ||
        gradient.layout() != at::kStrided ||
        gradient.sizes() != memory_.shape(slot)) {
      continue;
    }
    memory_.view(slot).copy_(gradient);
    gradient = memory_.view(slot);
  }
}

void GradientViews::set_aside(std::span<const size_t> slots) {
  set_aside_.clear();
  for (const size_t slot : slots) {
    const at::Tensor& gradient = parameters_[slot]->grad();
    if (memory_.is_view(slot, gradient)) {
      set_aside_.push_back({.slot = slot, .gradient = gradient.clone()});
    }
  }
}

void GradientViews::put_back(
    std::span<const size_t> slots,
    absl::FunctionRef<void(const at::Tensor&)> before_use) {
  for (const SetAside& kept : set_aside_) {
    if (!std::ranges::binary_search(slots, kept.slot)) continue;
    before_use(kept.gradient);
    memory_.view(kept.slot).copy_(kept.gradient);
  }
  set_aside_.clear();
}

}  // namespace brigade
