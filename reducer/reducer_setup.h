// The parts of a reducer, checked on this rank and compared with the others.

#ifndef BRIGADE_REDUCER_REDUCER_SETUP_H_
#define BRIGADE_REDUCER_REDUCER_SETUP_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/planning/bucket_plan.h"
#include "brigade/reducer/parameter_table.h"
#include "brigade/reducer/reducer_options.h"

namespace brigade {

struct ReducerSetup {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  ReducerOptions options;  // with a comm_hook; names and flags are the table's
  ParameterTable table;
  BucketPlan plan;
};

// Collective. A rank with bad arguments takes part, so that all ranks fail.
// `first_buckets`: see Reducer's constructor.
//
// Errors: ValueError on every rank; see Reducer's constructor.
ReducerSetup checked_setup(
    std::vector<std::vector<at::Tensor>> replicas,
    c10::intrusive_ptr<c10d::ProcessGroup> group, ReducerOptions options,
    const std::vector<std::vector<size_t>>& first_buckets);

}  // namespace brigade

#endif  // BRIGADE_REDUCER_REDUCER_SETUP_H_
