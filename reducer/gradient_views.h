// Where a bucket's memory is what gradients lie in: views of it are `.grad`,
// whatever users put there, drop or keep in between.
//
// Of an unused parameter the gradient stays, though its place in the bucket
// travels as zeros: it is set aside, and put back if no rank has used it.
//
// Thread safety: none.

#ifndef BRIGADE_REDUCER_GRADIENT_VIEWS_H_
#define BRIGADE_REDUCER_GRADIENT_VIEWS_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "brigade/reducer/bucket_memory.h"

namespace brigade {

class GradientViews {
 public:
  // REQUIRES: both outlive this object; `parameters` by slot.
  GradientViews(const std::vector<const at::Tensor*>& parameters,
                BucketMemory& memory)
      : parameters_(parameters), memory_(memory) {}

  // The gradients are now views, with the values that they have; but those that
  // autograd is still to differentiate, or that don't fit.
  void adopt();

  // `gradient`: the slot's parameter's.
  void install(size_t slot, at::Tensor& gradient) {
    const at::Tensor& view = memory_.view(slot);
    if (!gradient.is_same(view)) gradient = view;
  }

  // Whoever has saved a view for a backward of its own is to be told that it
  // has another value.
  void tell_of_change(size_t slot) {
    const at::Tensor& view = memory_.made_view(slot);
    if (view.use_count() > 1) view.unsafeGetTensorImpl()->bump_version();
  }

  // Keeps what these gradients are, if they are views.
  void set_aside(std::span<const size_t> slots);

  // Those among what was set aside are that again; the rest is dropped.
  // `slots`: ascending. `before_use`: called with what is read here.
  void put_back(std::span<const size_t> slots,
                absl::FunctionRef<void(const at::Tensor&)> before_use);

  void drop_what_is_set_aside() { set_aside_.clear(); }

 private:
  struct SetAside {
    size_t slot;
    at::Tensor gradient;
  };

  const std::vector<const at::Tensor*>& parameters_;  // by slot
  BucketMemory& memory_;
  std::vector<SetAside> set_aside_;
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_GRADIENT_VIEWS_H_
