#include "brigade/reducer/reducer_setup.h"

#include <c10/util/Exception.h>

#include <optional>
#include <set>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "brigade/comm/agreement.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/group/group_info.h"
#include "brigade/comm_hooks/averaging_hook.h"
#include "brigade/comm_hooks/hook_traits.h"
#include "brigade/planning/bucket_plan.h"

namespace brigade {
namespace {

using Buckets = std::vector<std::vector<size_t>>;

BucketPlan initial_plan(const ParameterTable& table,
                        const std::vector<int64_t>& caps_bytes,
                        const Buckets& given) {
  if (given.empty()) {
    return value_or_throw(plan_by_size(
        table.specs(), reverse_registration_order(table.size()), caps_bytes));
  }
  throw_if_error(check_bucket_caps(caps_bytes));  // rebuilding uses them
  BucketPlan plan = value_or_throw(BucketPlan::create(given, table.size()));
  throw_if_error(check_bucket_kinds(plan, table.specs()));
  return plan;
}

void check_devices(const ParameterTable& table,
                   const c10d::ProcessGroup& group) {
  // The first parameter of a kind stands for its device.
  int num_kinds = 0;
  for (size_t i = 0; i < table.size(); ++i) {
    if (table.specs()[i].kind < num_kinds) continue;
    ++num_kinds;
    const at::Device device = table[i].device();
    TORCH_CHECK_VALUE(
        supports_device(group, device.type()), table.name_of(i), " is on ",
        device,
        ", but the process group has no backend for that device; make the "
        "group for it, or move the parameter");
  }
}

// `hook`: of the user's, or null.
void check_reproducible(c10d::CommHookInterface* hook,
                        const ParameterTable& table) {
  TORCH_CHECK_VALUE(
      hook == nullptr || traits_of(*hook).sums_in_order,
      "reproducible: the comm hook must be null, since it decides how "
      "gradients are summed; leave out one of them");
  for (size_t i = 0; i < table.size(); ++i) {
    TORCH_CHECK_VALUE(
        !table.is_sparse(i), "reproducible: expected dense gradients, but ",
        table.name_of(i), " has a sparse gradient; leave out reproducible");
  }
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
  std::optional<ParameterTable> table;
  std::optional<BucketPlan> plan;
  absl::Status local;  // peers are told of an error
  try {
    TORCH_CHECK_VALUE(options.max_unconfirmed_iterations >= 0 &&
                          options.max_unconfirmed_iterations <= 32,
                      "max_unconfirmed_iterations must be 0 to 32, it is ",
                      options.max_unconfirmed_iterations);
    table.emplace(std::move(replicas), std::move(options.parameter_names),
                  options.expect_sparse_gradients);
    check_devices(*table, *group);
    if (options.reproducible) {
      check_reproducible(options.comm_hook.get(), *table);
    }
    plan = initial_plan(*table, options.bucket_caps_bytes, given);
  } catch (const c10::ValueError& error) {
    local = absl::InvalidArgumentError(error.what_without_backtrace());
  }
  std::shared_ptr<OrderedAllReduce> ordered;
  if (!options.comm_hook && options.reproducible) {
    ordered = std::make_shared<OrderedAllReduce>(group);
  }
  if (!options.comm_hook) {
    options.comm_hook = default_hook(group, std::nullopt, ordered);
  }

  const bool alone = group->getSize() == 1 || !options.verify_across_ranks;
  std::vector<std::string> items;
  if (local.ok() && !alone) items = table->describe_all();
  if (options.verify_across_ranks) {
    require_agreement(group, "parameter", items, local);
  } else {
    throw_if_error(local);
  }
  if (!alone) {
    require_agreement(group, "reducer option", describe(options, given, *table),
                      absl::OkStatus());
  }
  if (ordered && options.verify_across_ranks) {
    ordered->connect_for(table->tensors());
  }
  return {.group = std::move(group),
          .options = std::move(options),
          .table = *std::move(table),
          .plan = *std::move(plan)};
}

}  // namespace brigade
