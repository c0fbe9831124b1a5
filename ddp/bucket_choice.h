// Which buckets a module's parameters are put into, where its options ask for
// more than planning by size: parameters that are delayed, or that travel in
// groups of their own.
//
// Thread safety: pure functions.

#ifndef BRIGADE_DDP_BUCKET_CHOICE_H_
#define BRIGADE_DDP_BUCKET_CHOICE_H_

#include <cstddef>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "brigade/ddp/data_parallel_options.h"
#include "brigade/ddp/module_tensors.h"

namespace brigade {

// The parameter group of a name; nullptr if it is in none.
const ParameterGroup* group_of(const std::string& name,
                               std::span<const ParameterGroup> groups);

// What names of parameters and buffers the options may hold. Errors
// (InvalidArgument): names that the module does not have; a parameter in two
// groups, or ignored and something else; a group that is null; a bucket plan of
// the user's beside delayed parameters or groups.
absl::Status check_choice(const ModuleTensors& module,
                          const DistributedDataParallelOptions& options);

// Indices into `trainable` by bucket, in launch order; empty if planning by
// size does. REQUIRES: check_choice() is OK. Errors: as plan_by_size().
absl::StatusOr<std::vector<std::vector<size_t>>> choose_buckets(
    std::span<const NamedTensor> trainable,
    const DistributedDataParallelOptions& options);

}  // namespace brigade

#endif  // BRIGADE_DDP_BUCKET_CHOICE_H_
