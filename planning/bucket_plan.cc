#include "brigade/planning/bucket_plan.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace brigade {
namespace {

template <typename... Parts>
absl::Status invalid(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(parts...));
}

struct FullBucket {
  size_t last_position = 0;  // of a member in `order`
  std::vector<size_t> members = {};
};

std::vector<FullBucket> fill_buckets(std::span<const ParameterSpec> parameters,
                                     std::span<const size_t> order,
                                     std::span<const int64_t> caps_bytes) {
  struct Kind {
    FullBucket open = {};
    int64_t size_bytes = 0;
    size_t num_closed = 0;
  };
  std::vector<FullBucket> closed;
  std::map<int, Kind> kinds;
  for (size_t position = 0; position < order.size(); ++position) {
    const ParameterSpec& spec = parameters[order[position]];
    if (spec.sparse) {
      closed.push_back({position, {order[position]}});
      continue;
    }
    Kind& kind = kinds[spec.kind];
    kind.open.last_position = position;
    kind.open.members.push_back(order[position]);
    kind.size_bytes += spec.size_bytes;
    if (kind.size_bytes >=
        caps_bytes[std::min(kind.num_closed, caps_bytes.size() - 1)]) {
      closed.push_back(std::move(kind.open));
      kind = {.num_closed = kind.num_closed + 1};
    }
  }
  for (auto& [id, kind] : kinds) {
    if (!kind.open.members.empty()) closed.push_back(std::move(kind.open));
  }
  return closed;
}

}  // namespace

absl::StatusOr<BucketPlan> BucketPlan::create(
    std::vector<std::vector<size_t>> buckets, size_t num_parameters) {
  if (num_parameters == 0) {
    return invalid("a bucket plan needs at least 1 parameter, got 0");
  }
  const std::string remedy =
      absl::StrCat(".\nList each of the ", num_parameters,
                   " parameters in exactly one bucket, or leave bucket_plan "
                   "out.");
  const VariableLocator nowhere = {.bucket = buckets.size()};
  std::vector<VariableLocator> locators(num_parameters, nowhere);
  for (size_t b = 0; b < buckets.size(); ++b) {
    if (buckets[b].empty()) {
      return invalid("bucket ", b, " of bucket_plan is empty", remedy);
    }
    for (size_t s = 0; s < buckets[b].size(); ++s) {
      const size_t parameter = buckets[b][s];
      if (parameter >= num_parameters) {
        return invalid("bucket ", b, " of bucket_plan lists parameter ",
                       parameter, ", but there are only ", num_parameters,
                       remedy);
      }
      VariableLocator& locator = locators[parameter];
      if (locator != nowhere) {
        return invalid("bucket_plan lists parameter ", parameter,
                       " in buckets ", locator.bucket, " and ", b, remedy);
      }
      locator = {.bucket = b, .slot = s};
    }
  }
  const auto missing = std::ranges::find(locators, nowhere);
  if (missing != locators.end()) {
    return invalid("bucket_plan lacks parameter ", missing - locators.begin(),
                   remedy);
  }
  return BucketPlan(std::move(buckets), std::move(locators));
}

std::string to_text(const BucketPlan& plan) {
  std::vector<std::string> buckets;
  for (const std::vector<size_t>& bucket : plan.buckets()) {
    buckets.push_back(absl::StrJoin(bucket, ","));
  }
  return absl::StrCat("[[", absl::StrJoin(buckets, "],["), "]]");
}

absl::StatusOr<std::vector<std::vector<size_t>>> parse_buckets(
    absl::string_view text) {
  std::vector<std::vector<size_t>> buckets;
  const std::string dense = absl::StrReplaceAll(text, {{" ", ""}});
  absl::string_view rest = dense;
  bool is_valid =
      absl::ConsumePrefix(&rest, "[[") && absl::ConsumeSuffix(&rest, "]]");
  for (const absl::string_view bucket : absl::StrSplit(rest, "],[")) {
    buckets.emplace_back();
    for (const absl::string_view parameter : absl::StrSplit(bucket, ',')) {
      uint64_t number = 0;
      is_valid = is_valid && absl::SimpleAtoi(parameter, &number);
      buckets.back().push_back(static_cast<size_t>(number));
    }
  }
  if (is_valid) return buckets;
  return invalid("expected buckets such as [[2,1],[0]], found '",
                 text.substr(0, 40), "'.\nPass the text of to_text().");
}

int64_t bytes_of(std::span<const size_t> bucket,
                 std::span<const ParameterSpec> parameters) {
  int64_t bytes = 0;
  for (const size_t i : bucket) bytes += parameters[i].size_bytes;
  return bytes;
}

absl::Status check_bucket_kinds(const BucketPlan& plan,
                                std::span<const ParameterSpec> parameters) {
  for (size_t b = 0; b < plan.num_buckets(); ++b) {
    const std::vector<size_t>& members = plan.buckets()[b];
    const ParameterSpec& first = parameters[members.front()];
    for (size_t member : members) {
      if (parameters[member].kind != first.kind) {
        return invalid("bucket ", b,
                       " of bucket_plan mixes dtypes or devices: parameters ",
                       members.front(), " and ", member,
                       " differ; put them in separate buckets");
      }
      if (parameters[member].sparse && members.size() > 1) {
        return invalid("bucket ", b, " of bucket_plan holds parameter ", member,
                       ", whose gradient is sparse, and ", members.size() - 1,
                       " more; a sparse gradient needs a bucket to itself");
      }
    }
  }
  return absl::OkStatus();
}

absl::Status check_bucket_caps(std::span<const int64_t> caps_bytes) {
  if (caps_bytes.empty()) return invalid("bucket caps must not be empty");
  for (size_t k = 0; k < caps_bytes.size(); ++k) {
    if (caps_bytes[k] <= 0) {
      return invalid("bucket cap ", k, " must be > 0 bytes, got ",
                     caps_bytes[k]);
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
    return invalid("order must list each of ", parameters.size(),
                   " parameters once, got ", order.size(),
                   is_in_range ? "" : ", one of them out of range");
  }
  std::vector<FullBucket> full = fill_buckets(parameters, order, caps_bytes);
  std::ranges::sort(full, {}, &FullBucket::last_position);
  std::vector<std::vector<size_t>> buckets;
  for (FullBucket& bucket : full) buckets.push_back(std::move(bucket.members));
  return BucketPlan::create(std::move(buckets), parameters.size());
}

}  // namespace brigade
