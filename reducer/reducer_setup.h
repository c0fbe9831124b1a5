// Checked arguments of a Reducer, equal on all ranks if they are compared.

#ifndef BRIGADE_REDUCER_REDUCER_SETUP_H_
#define BRIGADE_REDUCER_REDUCER_SETUP_H_

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "brigade/planning/bucket_plan.h"
#include "brigade/reducer/parameter_table.h"
#include "brigade/reducer/reducer_options.h"

namespace brigade {

struct ReducerSetup {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  ReducerOptions options;  // comm_hook is set; names and flags are in `table`
  ParameterTable table;
  BucketPlan plan;
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_REDUCER_SETUP_H_
