// The models that bucket_size trains.
//
// Thread safety: none.

#ifndef BRIGADE_BENCHMARKS_BUCKET_SIZE_WORKLOADS_H_
#define BRIGADE_BENCHMARKS_BUCKET_SIZE_WORKLOADS_H_

#include <chrono>
#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "brigade/benchmarks/support/gradient_shapes.h"
#include "brigade/bucket_sweep/workload.h"

namespace brigade::benchmarks {

// The network of examples/digits on `images_per_rank` images: computes for
// real.
std::unique_ptr<SweepWorkload> make_digits_workload(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    int64_t images_per_rank);

// One gradient per shape, which becomes ready when its share of `backward`, by
// its size, has passed: nothing is computed, and the thread sleeps, as a CPU
// does while a GPU works.
std::unique_ptr<SweepWorkload> make_shaped_workload(
    int rank, int world_size, const Shapes& shapes,
    std::chrono::nanoseconds backward);

}  // namespace brigade::benchmarks

#endif  // BRIGADE_BENCHMARKS_BUCKET_SIZE_WORKLOADS_H_
