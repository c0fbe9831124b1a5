#include "brigade/ddp/parameter_groups.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "brigade/comm_hooks/averaging_hook.h"
#include "brigade/comm_hooks/routing_hook.h"
#include "brigade/planning/bucket_plan.h"

namespace brigade {
namespace {

using Names = std::vector<std::string>;

absl::Status check_known(const char* option, const ModuleTensors& module,
                         const Names& names,
                         const std::unordered_set<std::string>& known) {
  Names unknown;
  for (const std::string& name : names) {
    if (!known.contains(name)) unknown.push_back(name);
  }
  if (unknown.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      option, ": module ", module.module_name, " has no '",
      absl::StrJoin(unknown, "', '"), "'; give names as the module does"));
}

absl::Status check_groups(const ModuleTensors& module,
                          const DistributedDataParallelOptions& options,
                          const std::unordered_set<std::string>& parameters) {
  const std::unordered_set<std::string> ignored(options.ignored.begin(),
                                                options.ignored.end());
  Names grouped;
  std::unordered_set<std::string> seen;
  for (const ParameterGroup& group : options.parameter_groups) {
    if (!group.group) {
      return absl::InvalidArgumentError(absl::StrCat(
          "parameter_groups: the process group of '",
          absl::StrJoin(group.names, "', '"), "' is null; make one first"));
    }
    for (const std::string& name : group.names) {
      grouped.push_back(name);
      if (seen.insert(name).second && !ignored.contains(name)) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("parameter_groups: parameter '", name,
                       "' is listed twice, or ignored; list it once"));
    }
  }
  if (grouped.empty()) return absl::OkStatus();
  if (!options.reducer.bucket_plan.empty()) {
    return absl::InvalidArgumentError(
        "bucket_plan can't be given together with parameter groups, which have "
        "buckets of their own; leave out one of them");
  }
  if (options.reducer.rebuild_buckets.value_or(false)) {
    return absl::InvalidArgumentError(
        "rebuild_buckets must not be true with parameter groups, whose buckets "
        "it would mix; leave it unset");
  }
  if (options.reducer.reproducible) {
    return absl::InvalidArgumentError(
        "reproducible: parameter_groups must be empty, since their sums are "
        "not ordered; leave out one of them");
  }
  return check_known("parameter_groups", module, grouped, parameters);
}

}  // namespace

const ParameterGroup* group_of(const std::string& name,
                               std::span<const ParameterGroup> groups) {
  for (const ParameterGroup& group : groups) {
    if (std::ranges::find(group.names, name) != group.names.end()) {
      return &group;
    }
  }
  return nullptr;
}

absl::Status check_names(const ModuleTensors& module,
                         const DistributedDataParallelOptions& options) {
  std::unordered_set<std::string> known;
  for (const NamedTensor& entry : module.parameters) known.insert(entry.name);
  if (absl::Status status = check_groups(module, options, known);
      !status.ok()) {
    return status;
  }
  for (const NamedTensor& entry : module.buffers) known.insert(entry.name);
  return check_known("ignored", module, options.ignored, known);
}

std::vector<std::vector<size_t>> plan_with_groups(
    std::span<const NamedTensor> trainable,
    const DistributedDataParallelOptions& options) {
  if (options.parameter_groups.empty()) return {};
  std::map<std::tuple<at::ScalarType, std::string, const ParameterGroup*>, int>
      kinds;
  const std::vector<bool>& sparse = options.reducer.expect_sparse_gradients;
  std::vector<ParameterSpec> specs;
  for (const auto& [name, tensor] : trainable) {
    const auto [it, is_new] =
        kinds.try_emplace({tensor.scalar_type(), tensor.device().str(),
                           group_of(name, options.parameter_groups)},
                          static_cast<int>(kinds.size()));
    specs.push_back(
        {.size_bytes = static_cast<int64_t>(tensor.nbytes()),
         .kind = it->second,
         .sparse = specs.size() < sparse.size() && sparse[specs.size()]});
  }
  const absl::StatusOr<BucketPlan> plan =
      plan_by_size(specs, reverse_registration_order(specs.size()),
                   options.reducer.bucket_caps_bytes);
  if (!plan.ok()) return {};
  return {plan->buckets().begin(), plan->buckets().end()};
}

std::shared_ptr<c10d::CommHookInterface> route_groups(
    std::shared_ptr<c10d::CommHookInterface> hook,
    std::span<const NamedTensor> parameters,
    std::span<const ParameterGroup> groups,
    std::optional<at::ScalarType> wire_dtype) {
  if (groups.empty()) return hook;
  std::vector<Route> routes;
  for (const ParameterGroup& group : groups) {
    Route& route = routes.emplace_back();
    route.hook = std::make_shared<AveragingHook>(group.group, wire_dtype);
    for (const auto& [name, tensor] : parameters) {
      if (group_of(name, groups) == &group) route.parameters.push_back(tensor);
    }
  }
  return std::make_shared<RoutingHook>(std::move(hook), std::move(routes));
}

}  // namespace brigade
