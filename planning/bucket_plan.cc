#include "brigade/planning/bucket_plan.h"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <map>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace brigade {
namespace {

// The buckets of one kind: the one that still accepts parameters, and how many
// have closed.
struct KindState {
  std::vector<size_t> members = {};
  int64_t size_bytes = 0;
  size_t last_position = 0;
  size_t num_closed = 0;
};

struct ClosedBucket {
  size_t last_position = 0;  // in `order`: when the bucket becomes full
  std::vector<size_t> members = {};
};

// In the order in which they close.
std::vector<ClosedBucket> fill_buckets(
    std::span<const ParameterSpec> parameters, std::span<const size_t> order,
    std::span<const int64_t> caps_bytes) {
  std::vector<ClosedBucket> closed;
  std::map<int, KindState> kinds;
  auto last_kind = kinds.end();  // neighbours are mostly of one
  for (size_t position = 0; position < order.size(); ++position) {
    const size_t parameter = order[position];
    const ParameterSpec& spec = parameters[parameter];
    if (spec.sparse) {
      closed.push_back({position, {parameter}});
      continue;
    }
    if (last_kind == kinds.end() || last_kind->first != spec.kind) {
      last_kind = kinds.try_emplace(spec.kind).first;
    }
    KindState& kind = last_kind->second;
    kind.members.push_back(parameter);
    kind.size_bytes += spec.size_bytes;
    kind.last_position = position;
    const int64_t cap_bytes =
        caps_bytes[std::min(kind.num_closed, caps_bytes.size() - 1)];
    if (kind.size_bytes >= cap_bytes) {
      closed.push_back({position, std::move(kind.members)});
      kind = KindState{.num_closed = kind.num_closed + 1};
    }
  }
  for (auto& [id, kind] : kinds) {
    if (!kind.members.empty()) {
      closed.push_back({kind.last_position, std::move(kind.members)});
    }
  }
  return closed;
}

std::vector<std::vector<size_t>> members_of(std::vector<ClosedBucket> closed) {
  std::vector<std::vector<size_t>> buckets;
  buckets.reserve(closed.size());
  for (ClosedBucket& bucket : closed) {
    buckets.push_back(std::move(bucket.members));
  }
  return buckets;
}

}  // namespace

absl::StatusOr<BucketPlan> BucketPlan::create(
    std::vector<std::vector<size_t>> buckets, size_t num_parameters) {
  if (num_parameters == 0) {
    return absl::InvalidArgumentError(
        "a bucket plan needs at least 1 parameter, got 0");
  }
  std::vector<VariableLocator> locators(num_parameters);
  std::vector<bool> placed(num_parameters, false);
  for (size_t b = 0; b < buckets.size(); ++b) {
    if (buckets[b].empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("bucket ", b, " of the plan is empty"));
    }
    for (size_t s = 0; s < buckets[b].size(); ++s) {
      const size_t parameter = buckets[b][s];
      if (parameter >= num_parameters) {
        return absl::InvalidArgumentError(
            absl::StrCat("bucket ", b, " of the plan lists parameter ",
                         parameter, ", but there are only ", num_parameters));
      }
      if (placed[parameter]) {
        return absl::InvalidArgumentError(
            absl::StrCat("parameter ", parameter,
                         " must be in exactly one bucket, found it in buckets ",
                         locators[parameter].bucket, " and ", b));
      }
      placed[parameter] = true;
      locators[parameter] = {.bucket = b, .slot = s};
    }
  }
  for (size_t parameter = 0; parameter < num_parameters; ++parameter) {
    if (!placed[parameter]) {
      return absl::InvalidArgumentError(
          absl::StrCat("parameter ", parameter,
                       " must be in exactly one bucket, found it in none"));
    }
  }
  return BucketPlan(std::move(buckets), std::move(locators));
}

absl::Status check_bucket_kinds(const BucketPlan& plan,
                                std::span<const ParameterSpec> parameters) {
  for (size_t b = 0; b < plan.num_buckets(); ++b) {
    const std::vector<size_t>& members = plan.buckets()[b];
    const ParameterSpec& first = parameters[members.front()];
    for (size_t member : members) {
      if (parameters[member].kind != first.kind) {
        return absl::InvalidArgumentError(absl::StrCat(
            "bucket ", b, " of the plan mixes dtypes or devices: parameters ",
            members.front(), " and ", member, " differ; put them apart"));
      }
      if (parameters[member].sparse && members.size() > 1) {
        return absl::InvalidArgumentError(
            absl::StrCat("bucket ", b, " of the plan holds parameter ", member,
                         ", whose gradient is sparse, and ", members.size() - 1,
                         " more; a sparse gradient needs a bucket to itself"));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status check_bucket_caps(std::span<const int64_t> caps_bytes) {
  if (caps_bytes.empty()) {
    return absl::InvalidArgumentError("bucket caps must not be empty");
  }
  for (size_t k = 0; k < caps_bytes.size(); ++k) {
    if (caps_bytes[k] <= 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "bucket cap ", k, " must be > 0 bytes, got ", caps_bytes[k]));
    }
  }
  return absl::OkStatus();
}

std::vector<size_t> reverse_registration_order(size_t num_parameters) {
  std::vector<size_t> order(num_parameters);
  std::iota(order.rbegin(), order.rend(), size_t{0});
  return order;
}

absl::StatusOr<BucketPlan> plan_by_size(
    std::span<const ParameterSpec> parameters, std::span<const size_t> order,
    std::span<const int64_t> caps_bytes) {
  if (absl::Status status = check_bucket_caps(caps_bytes); !status.ok()) {
    return status;
  }
  const bool is_in_range = std::ranges::all_of(
      order, [&](size_t parameter) { return parameter < parameters.size(); });
  if (!is_in_range || order.size() != parameters.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "order must list each of ", parameters.size(), " parameters once, got ",
        order.size(), is_in_range ? "" : ", one of them out of range"));
  }
  std::vector<ClosedBucket> closed =
      fill_buckets(parameters, order, caps_bytes);
  std::ranges::sort(closed, {}, &ClosedBucket::last_position);
  return BucketPlan::create(members_of(std::move(closed)), parameters.size());
}

}  // namespace brigade
