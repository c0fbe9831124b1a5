// Parameters that are averaged over process groups of their own: the names that
// options may hold, their buckets, and the comm hook that routes these.
//
// Thread safety: pure functions.

#ifndef BRIGADE_DDP_PARAMETER_GROUPS_H_
#define BRIGADE_DDP_PARAMETER_GROUPS_H_

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <vector>

#include "absl/status/status.h"
#include "brigade/ddp/data_parallel_options.h"
#include "brigade/ddp/module_tensors.h"

namespace brigade {

// The parameter group of a name; nullptr if it is in none.
const ParameterGroup* group_of(const std::string& name,
                               std::span<const ParameterGroup> groups);

// Errors (InvalidArgument): names that the module does not have; a parameter in
// two groups, or ignored and in one; a group that is null; a bucket plan of the
// user's or a comm hook in the order of the ranks beside groups.
absl::Status check_names(const ModuleTensors& module,
                         const DistributedDataParallelOptions& options);

// Buckets of indices into `trainable`, in launch order, each of one group;
// empty if there are no groups, or the options do not allow a plan: the reducer
// says what is wrong then. REQUIRES: check_names() is OK.
std::vector<std::vector<size_t>> plan_with_groups(
    std::span<const NamedTensor> trainable,
    const DistributedDataParallelOptions& options);

// A hook by which parameters of groups travel there, the others by `hook`;
// `hook` itself if there are no groups. `wire_dtype`: of the groups' gradients;
// unset: their own.
std::shared_ptr<c10d::CommHookInterface> route_groups(
    std::shared_ptr<c10d::CommHookInterface> hook,
    std::span<const NamedTensor> parameters,
    std::span<const ParameterGroup> groups,
    std::optional<at::ScalarType> wire_dtype);

}  // namespace brigade

#endif  // BRIGADE_DDP_PARAMETER_GROUPS_H_
