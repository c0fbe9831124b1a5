// A model whose steps are timed: how its gradients come to be, and what they
// must be after averaging. Knows nothing of buckets or clocks.
//
// Thread safety: none.

#ifndef BRIGADE_BUCKET_SWEEP_WORKLOAD_H_
#define BRIGADE_BUCKET_SWEEP_WORKLOAD_H_

#include <ATen/ATen.h>

#include <vector>

namespace brigade {

class SweepWorkload {
 public:
  virtual ~SweepWorkload() = default;

  // Those that are trained: what a reducer is made of.
  virtual const std::vector<at::Tensor>& parameters() const = 0;

  // Makes the parameters' gradients undefined, and does what a step needs but
  // must not be timed.
  virtual void set_up_step() = 0;

  // The loss, on which backward() can be called once per set_up_step().
  virtual at::Tensor forward() = 0;

  // Between these, gradients are such that one in the wrong place shows, and
  // what is needed to judge them is kept: slower, and not timed.
  virtual void begin_check() {}
  virtual void end_check() {}

  // Whether the parameters' gradients are the averages over all ranks, for this
  // rank. May be collective. REQUIRES: the last step began after begin_check().
  virtual bool gradients_are_averages() = 0;
};

}  // namespace brigade

#endif  // BRIGADE_BUCKET_SWEEP_WORKLOAD_H_
