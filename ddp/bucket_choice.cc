#include "brigade/ddp/bucket_choice.h"

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <string>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "brigade/planning/bucket_plan.h"

namespace brigade {
namespace {

using Buckets = std::vector<std::vector<size_t>>;
using Names = std::vector<std::string>;

constexpr std::array<int64_t, 1> kOneBucketPerKind = {
    std::numeric_limits<int64_t>::max()};

bool contains(const Names& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool chooses(const DistributedDataParallelOptions& options) {
  return !options.delayed.empty() || !options.parameter_groups.empty();
}

class NameCheck {
 public:
  NameCheck(const ModuleTensors& module, const Names& ignored)
      : module_(module), ignored_(ignored.begin(), ignored.end()) {
    for (const NamedTensor& entry : module.parameters) add(entry.name);
  }

  absl::Status parameters(const char* option, const Names& names) const {
    std::unordered_set<std::string> seen;
    for (const std::string& name : names) {
      if (seen.insert(name).second && !ignored_.contains(name)) continue;
      return absl::InvalidArgumentError(
          absl::StrCat(option, ": parameter '", name,
                       "' is listed twice, or ignored; list it once"));
    }
    return known(option, names);
  }

  absl::Status parameters_and_buffers(const Names& names) {
    for (const NamedTensor& entry : module_.buffers) add(entry.name);
    return known("ignored", names);
  }

 private:
  void add(const std::string& name) { known_.insert(name); }

  absl::Status known(const char* option, const Names& names) const {
    Names unknown;
    for (const std::string& name : names) {
      if (!known_.contains(name)) unknown.push_back(name);
    }
    if (unknown.empty()) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        option, ": module ", module_.module_name, " has no '",
        absl::StrJoin(unknown, "', '"), "'; give names as the module does"));
  }

  const ModuleTensors& module_;
  const std::unordered_set<std::string> ignored_;
  std::unordered_set<std::string> known_;
};

std::vector<ParameterSpec> specs_of(
    std::span<const NamedTensor> trainable,
    const DistributedDataParallelOptions& options) {
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
  return specs;
}

// Appends the buckets of `members`, which are indices into `specs`.
absl::Status append_buckets(std::span<const size_t> members,
                            std::span<const ParameterSpec> specs,
                            std::span<const int64_t> caps, Buckets& buckets) {
  if (members.empty()) return absl::OkStatus();
  std::vector<ParameterSpec> own;
  for (const size_t i : members) own.push_back(specs[i]);
  const absl::StatusOr<BucketPlan> plan =
      plan_by_size(own, reverse_registration_order(own.size()), caps);
  if (!plan.ok()) return plan.status();
  for (std::vector<size_t> bucket : plan->buckets()) {
    for (size_t& i : bucket) i = members[i];
    buckets.push_back(std::move(bucket));
  }
  return absl::OkStatus();
}

}  // namespace

const ParameterGroup* group_of(const std::string& name,
                               std::span<const ParameterGroup> groups) {
  for (const ParameterGroup& group : groups) {
    if (contains(group.names, name)) return &group;
  }
  return nullptr;
}

absl::Status check_choice(const ModuleTensors& module,
                          const DistributedDataParallelOptions& options) {
  NameCheck check(module, options.ignored);
  if (absl::Status status = check.parameters("delayed", options.delayed);
      !status.ok()) {
    return status;
  }
  Names grouped;
  for (const ParameterGroup& group : options.parameter_groups) {
    if (!group.group) {
      return absl::InvalidArgumentError(absl::StrCat(
          "parameter_groups: the process group of '",
          absl::StrJoin(group.names, "', '"), "' is null; make one first"));
    }
    grouped.insert(grouped.end(), group.names.begin(), group.names.end());
  }
  if (absl::Status status = check.parameters("parameter_groups", grouped);
      !status.ok()) {
    return status;
  }
  if (absl::Status status = check.parameters_and_buffers(options.ignored);
      !status.ok()) {
    return status;
  }
  if (chooses(options) && !options.reducer.bucket_plan.empty()) {
    return absl::InvalidArgumentError(
        "bucket_plan can't be given together with delayed parameters or "
        "parameter groups; put these into the plan's buckets");
  }
  if (!grouped.empty() && options.reducer.rebuild_buckets.value_or(false)) {
    return absl::InvalidArgumentError(
        "rebuild_buckets must not be true with parameter groups, whose buckets "
        "it would mix; leave it unset");
  }
  return absl::OkStatus();
}

absl::StatusOr<Buckets> choose_buckets(
    std::span<const NamedTensor> trainable,
    const DistributedDataParallelOptions& options) {
  if (!chooses(options)) return Buckets{};
  std::vector<size_t> prompt;
  std::vector<size_t> delayed;
  for (size_t i = 0; i < trainable.size(); ++i) {
    (contains(options.delayed, trainable[i].name) ? delayed : prompt)
        .push_back(i);
  }
  const std::vector<ParameterSpec> specs = specs_of(trainable, options);
  Buckets buckets;
  if (absl::Status status = append_buckets(
          prompt, specs, options.reducer.bucket_caps_bytes, buckets);
      !status.ok()) {
    return status;
  }
  if (absl::Status status =
          append_buckets(delayed, specs, kOneBucketPerKind, buckets);
      !status.ok()) {
    return status;
  }
  return buckets;
}

}  // namespace brigade
