// Whether `.grad` holds the average of what the ranks' backwards computed.
//
// Takes the gradients of one backward where autograd hands them out, before
// anything else sees them, so the loss need not be the same twice.
//
// Thread safety: none; the backward may run on other threads.

#ifndef BRIGADE_BUCKET_SWEEP_GRADIENT_CHECK_H_
#define BRIGADE_BUCKET_SWEEP_GRADIENT_CHECK_H_

#include <ATen/ATen.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace brigade {

class GradientCheck {
 public:
  // Listens to the parameters until it is destroyed.
  GradientCheck(std::vector<at::Tensor> parameters,
                c10::intrusive_ptr<c10d::ProcessGroup> group);
  ~GradientCheck();
  GradientCheck(const GradientCheck&) = delete;
  GradientCheck& operator=(const GradientCheck&) = delete;

  // Collective; the answer is this rank's. REQUIRES: one backward since
  // construction.
  bool gradients_are_averages() const;

 private:
  bool is_average(size_t parameter) const;
  at::Tensor average(at::Tensor tensor) const;

  const std::vector<at::Tensor> parameters_;
  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::vector<at::Tensor> local_;  // undefined: no gradient came
  std::vector<unsigned> hooks_;
};

}  // namespace brigade

#endif  // BRIGADE_BUCKET_SWEEP_GRADIENT_CHECK_H_
