// A model whose steps are timed: how its gradients come to be, and what they
// must be after averaging.  Knows nothing of buckets or clocks.
//
// Thread safety: none.

#ifndef BRIGADE_BENCHMARKS_BUCKET_SIZE_WORKLOAD_H_
#define BRIGADE_BENCHMARKS_BUCKET_SIZE_WORKLOAD_H_

#include <torch/torch.h>

#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/benchmarks/support/gradient_shapes.h"

namespace brigade::benchmarks {

class Workload {
 public:
  virtual ~Workload() = default;

  virtual const std::vector<at::Tensor>& parameters() const = 0;

  // Makes the parameters' gradients undefined, and does what a step needs but
  // must not be timed.
  virtual void set_up_step() = 0;

  // The loss, on which backward() can be called once per set_up_step().
  virtual at::Tensor forward() = 0;

  // From now on, gradients are such that one in the wrong place shows.  Slower
  // where gradients cost nothing otherwise.
  virtual void begin_check() {}
  virtual void end_check() {}

  // Whether the parameters' gradients are the averages over all ranks.
  virtual bool gradients_are_averages() const = 0;
};

// The network of examples/digits on `images_per_rank` images: computes for
// real. Collective.
std::unique_ptr<Workload> make_digits_workload(
    c10::intrusive_ptr<c10d::ProcessGroup> group, int64_t images_per_rank);

// One gradient per shape, which becomes ready when its share of `backward`, by
// its size, has passed: nothing is computed, and the thread sleeps, as a CPU
// does while a GPU works.
std::unique_ptr<Workload> make_shaped_workload(
    int rank, int world_size, const Shapes& shapes,
    std::chrono::nanoseconds backward);

}  // namespace brigade::benchmarks

#endif  // BRIGADE_BENCHMARKS_BUCKET_SIZE_WORKLOAD_H_
