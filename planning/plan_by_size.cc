#include "brigade/planning/plan_by_size.h"

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace brigade {
namespace {

absl::Status validate(std::span<const ParameterSpec> parameters,
                      std::span<const size_t> order,
                      std::span<const int64_t> caps_bytes) {
  if (parameters.empty()) {
    return absl::InvalidArgumentError(
        "a bucket plan needs at least 1 parameter, got 0");
  }
  if (absl::Status status = check_bucket_caps(caps_bytes); !status.ok()) {
    return status;
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].size_bytes < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("parameter ", i, " must have size_bytes >= 0, got ",
                       parameters[i].size_bytes));
    }
  }
  std::vector<bool> seen(parameters.size(), false);
  for (size_t parameter : order) {
    if (parameter >= parameters.size() || seen[parameter]) {
      return absl::InvalidArgumentError(absl::StrCat(
          "order must list each of ", parameters.size(),
          " parameters once, found ", parameter,
          parameter < parameters.size() ? " twice" : " out of range"));
    }
    seen[parameter] = true;
  }
  if (order.size() != parameters.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("order must list each of ", parameters.size(),
                     " parameters once, got ", order.size()));
  }
  return absl::OkStatus();
}

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
  if (absl::Status status = validate(parameters, order, caps_bytes);
      !status.ok()) {
    return status;
  }

  std::vector<ClosedBucket> closed =
      fill_buckets(parameters, order, caps_bytes);
  std::ranges::sort(closed, {}, &ClosedBucket::last_position);
  return BucketPlan::create(members_of(std::move(closed)), parameters.size());
}

}  // namespace brigade
