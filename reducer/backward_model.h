// Model of a backward on the live group, for planning/planners.h: when its
// gradients become ready, and the time of all-reduces.
//
// Thread safety: none.

#ifndef BRIGADE_REDUCER_BACKWARD_MODEL_H_
#define BRIGADE_REDUCER_BACKWARD_MODEL_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "brigade/observing/timeline.h"
#include "brigade/planning/planners.h"

namespace brigade {

class HostSums;

struct BackwardModel {
  Backward backward = {};
  double delivery_s = 0;  // from the last collective's end until .grad is set
  std::vector<CostPoint> points = {};                   // measured all-reduces
  CollectiveCost cost = *CollectiveCost::linear(0, 0);  // fitted to them
};

class BackwardProfiler {
 public:
  // `sparse`: as ReducerOptions::expect_sparse_gradients.
  BackwardProfiler(std::vector<at::Tensor> parameters, std::vector<bool> sparse,
                   c10::intrusive_ptr<c10d::ProcessGroup> group);

  // The buckets to profile with. On CPUs one per kind, so that backward runs
  // alone; on devices, where the host is ahead and a gradient is ready when its
  // bucket is packed, one per parameter.
  std::vector<std::vector<size_t>> buckets() const;

  // Adds a step with buckets().
  void add(const Timeline& timeline);

  // Adds a step with other buckets, from which model() learns how backward and
  // collectives slow each other. Without effect on devices.
  void add_overlapped(const Timeline& timeline, const BucketPlan& plan);

  // Drops all added steps.
  void clear();

  // Medians of the added steps on the slowest rank, and all-reduces from 1 KiB
  // to the gradients' size or 64 MiB, which need that much memory. Collective;
  // equal on all ranks. A rank without steps, for want of data, takes part.
  BackwardModel model();

  // Collective. Replaces each number by its maximum over ranks.
  void take_slowest(std::vector<double>& seconds) const;

  // Collective. Blocks until all ranks and their devices have reached it.
  void barrier() const;

  // Collective. Joins the default hook's sums in shared memory. model() calls
  // it.
  void connect();

  // All-reduces these tensors as the default hook does. `at_once`: all are
  // launched before the first is awaited. Returns the seconds. Collective.
  // REQUIRES: connect().
  double all_reduce(const std::vector<at::Tensor>& buffers, bool at_once) const;

  // Blocks until the device has finished its work.
  void synchronize() const;

 private:
  at::Device device() const { return parameters_.front().device(); }
  // A step's end of backward; until then, seconds with a collective in flight,
  // and of these collectives alone.
  struct Overlap {
    double end_s = 0;
    double busy_s = 0;
    std::vector<std::pair<int64_t, double>> parts = {};  // bytes, share
  };

  Backward backward_of(const std::vector<double>& times,
                       double packing_s) const;
  Contention contention(double end_s, const CollectiveCost& cost) const;
  std::vector<CostPoint> time_all_reduces() const;
  double time_all_reduces_of(int64_t bytes, int count) const;

  const std::vector<at::Tensor> parameters_;
  const std::vector<bool> sparse_;
  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::shared_ptr<HostSums> host_sums_;       // null: none, or not connected
  std::vector<std::vector<double>> ready_s_;  // by parameter, then by step
  std::vector<double> end_s_;                 // by step
  std::vector<double> packing_s_;             // by step
  std::vector<double> delivery_s_;            // by step
  std::vector<Overlap> overlaps_;             // by step
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_BACKWARD_MODEL_H_
