#include "brigade/reducer/reducer_setup.h"

#include <c10/util/Exception.h>

#include <optional>
#include <set>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "brigade/comm/agreement.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/group/group_info.h"
#include "brigade/comm_hooks/averaging_hook.h"
#include "brigade/comm_hooks/hook_traits.h"
#include "brigade/comm_hooks/ordered_all_reduce.h"
#include "brigade/planning/bucket_plan.h"

namespace brigade {
namespace {

using Buckets = std::vector<std::vector<size_t>>;

absl::StatusOr<BucketPlan> initial_plan(const ParameterTable& table,
                                        const ReducerOptions& options,
                                        const Buckets& given) {
  if (given.empty()) {
    return plan_by_size(table.specs(), reverse_registration_order(table.size()),
                        options.bucket_caps_bytes);
  }
  // Rebuilding plans by size as well.
  if (absl::Status status = check_bucket_caps(options.bucket_caps_bytes);
      !status.ok()) {
    return status;
  }
  absl::StatusOr<BucketPlan> plan = BucketPlan::create(given, table.size());
  if (!plan.ok()) return plan;
  if (absl::Status status = check_bucket_kinds(*plan, table.specs());
      !status.ok()) {
    return status;
  }
  return plan;
}

absl::Status check_devices(const ParameterTable& table,
                           const c10d::ProcessGroup& group) {
  // The first parameter of a kind stands for its device.
  int num_kinds = 0;
  for (size_t i = 0; i < table.size(); ++i) {
    if (table.specs()[i].kind < num_kinds) continue;
    ++num_kinds;
    const at::Device device = table[i].device();
    if (!supports_device(group, device.type())) {
      return absl::InvalidArgumentError(absl::StrCat(
          table.name_of(i), " is on ", device.str(),
          ", but the process group has no backend for that device; make the "
          "group for it, or move the parameter"));
    }
  }
  return absl::OkStatus();
}

// `hook`: of the user's, or null.
absl::Status check_reproducible(c10d::CommHookInterface* hook,
                                const ParameterTable& table) {
  if (hook != nullptr && !traits_of(*hook).sums_in_order) {
    return absl::InvalidArgumentError(
        "reproducible: the comm hook must be null, since it decides how "
        "gradients are summed; leave out one of them");
  }
  for (size_t i = 0; i < table.size(); ++i) {
    if (!table.is_sparse(i)) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "reproducible: expected dense gradients, but ", table.name_of(i),
        " has a sparse gradient; leave out reproducible"));
  }
  return absl::OkStatus();
}

std::string describe_hook(c10d::CommHookInterface& hook,
                          const ParameterTable& table) {
  const HookTraits traits = traits_of(hook);
  if (traits.wire_format == nullptr) {
    return traits.name.empty() ? "the user's own" : traits.name;
  }
  std::set<std::string> formats;
  for (const at::Tensor& parameter : table.tensors()) {
    const at::ScalarType dtype = parameter.scalar_type();
    formats.insert(absl::StrCat(c10::toString(dtype), " travels as ",
                                c10::toString(traits.wire_dtype(dtype))));
  }
  return absl::StrJoin(formats, ", ");
}

std::string describe(const char* flag, bool value) {
  return absl::StrCat(flag, value ? " = true" : " = false");
}

// Options that must be equal on all ranks, one line each.
std::vector<std::string> describe(const ReducerOptions& options,
                                  const Buckets& given,
                                  const ParameterTable& table) {
  std::vector<std::string> buckets;
  for (const std::vector<size_t>& bucket : given) {
    buckets.push_back(absl::StrCat("[", absl::StrJoin(bucket, ", "), "]"));
  }
  return {
      absl::StrCat("local replicas = ", table.num_replicas()),
      absl::StrCat("bucket_caps_bytes = [",
                   absl::StrJoin(options.bucket_caps_bytes, ", "), "]"),
      absl::StrCat("bucket_plan = [", absl::StrJoin(buckets, ", "), "]"),
      describe("buckets are rebuilt", rebuilds_buckets(options)),
      describe("find_unused_parameters", options.find_unused_parameters),
      describe("skip_all_reduce_unused_parameters",
               options.skip_all_reduce_unused_parameters),
      describe("static_graph", options.static_graph),
      absl::StrCat("max_unconfirmed_iterations = ",
                   options.max_unconfirmed_iterations),
      describe("reproducible", options.reproducible),
      absl::StrCat("comm_hook: ", describe_hook(*options.comm_hook, table))};
}

struct LocalSetup {
  ParameterTable table;
  BucketPlan plan;
};

// Names and sparse flags move from `options` into the table.
absl::StatusOr<LocalSetup> local_setup(
    std::vector<std::vector<at::Tensor>> replicas,
    const c10d::ProcessGroup& group, ReducerOptions& options,
    const Buckets& given) {
  absl::StatusOr<ParameterTable> table = ParameterTable::create(
      std::move(replicas), std::move(options.parameter_names),
      std::move(options.expect_sparse_gradients));
  if (!table.ok()) return table.status();
  if (absl::Status status = check_devices(*table, group); !status.ok()) {
    return status;
  }
  if (options.reproducible) {
    const absl::Status status =
        check_reproducible(options.comm_hook.get(), *table);
    if (!status.ok()) return status;
  }
  absl::StatusOr<BucketPlan> plan = initial_plan(*table, options, given);
  if (!plan.ok()) return plan.status();
  return LocalSetup{.table = *std::move(table), .plan = *std::move(plan)};
}

}  // namespace

ReducerSetup checked_setup(std::vector<std::vector<at::Tensor>> replicas,
                           c10::intrusive_ptr<c10d::ProcessGroup> group,
                           ReducerOptions options,
                           const Buckets& first_buckets) {
  TORCH_CHECK_VALUE(group,
                    "Reducer needs a process group, got null.\n"
                    "Make one with init_process_group(), or with "
                    "single_process_group() for a world of 1.");
  if (!replicas.empty() && !replicas.front().empty() &&
      replicas.front().front().defined()) {
    suggest_control_device(group, replicas.front().front().device());
  }
  const Buckets& given =
      options.bucket_plan.empty() ? first_buckets : options.bucket_plan;
  absl::StatusOr<LocalSetup> local =
      local_setup(std::move(replicas), *group, options, given);
  std::shared_ptr<OrderedAllReduce> ordered;
  if (!options.comm_hook && options.reproducible) {
    ordered = std::make_shared<OrderedAllReduce>(group);
  }
  if (!options.comm_hook) {
    options.comm_hook = default_hook(group, std::nullopt, ordered);
  }

  TORCH_CHECK_VALUE(options.max_unconfirmed_iterations >= 0 &&
                        options.max_unconfirmed_iterations <= 32,
                    "Reducer: max_unconfirmed_iterations must be 0 to 32, "
                    "it is ",
                    options.max_unconfirmed_iterations, ".");
  const bool alone = group->getSize() == 1 || !options.verify_across_ranks;
  std::vector<std::string> items;
  if (local.ok() && !alone) items = local->table.describe_all();
  if (options.verify_across_ranks) {
    require_agreement(group, "parameter", items, local.status());
  } else {
    throw_if_error(local.status());
  }
  if (!alone) {
    require_agreement(group, "reducer option",
                      describe(options, given, local->table), absl::OkStatus());
  }
  if (ordered && options.verify_across_ranks) {
    ordered->connect_for(local->table.tensors());
  }
  return {.group = std::move(group),
          .options = std::move(options),
          .table = std::move(local->table),
          .plan = std::move(local->plan)};
}

}  // namespace brigade
