// Parts of error messages: an exception's text, rank lists, iterations, tensor
// descriptions, shortened lists.
//
// Thread safety: pure functions.

#ifndef BRIGADE_COMM_ERRORS_ERROR_TEXTS_H_
#define BRIGADE_COMM_ERRORS_ERROR_TEXTS_H_

#include <ATen/core/Tensor.h>
#include <sys/types.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"

namespace brigade {

// Returns the text of an exception of any type, without a backtrace.
std::string message_of(const std::exception_ptr& error);

// "rank 3", "ranks 0, 2, 5-9".
std::string describe_ranks(std::span<const int> ranks);

// Throws RuntimeError if this process was forked from `maker`, which made the
// object that `user` names.
void check_process(const char* user, pid_t maker);

// "1 bucket", "2 buckets"
std::string counted(size_t count, std::string_view noun);

// "the outermost unit", or "unit 'blocks.1'": an FSDP unit by its name, which
// is empty for the outermost one.
std::string describe_unit(std::string_view name);

// "float32"
std::string describe_dtype(at::ScalarType dtype);

// "0.3 s"
std::string describe_seconds(std::chrono::milliseconds time);

// Kind of a segment, a forward or backward of a sharded model.
enum class SegmentKind : int8_t {
  kForward,
  kLocalBackward,  // gradients stay on the rank
  kBackward,       // gradients are reduced, which ends a step
  kWithoutData,    // the peers' kind, on a rank without data
};

inline constexpr int64_t kStepsOfKind = int64_t{1} << 56;
inline constexpr int64_t kFirstSegment = 4 * kStepsOfKind;

// Returns the number by which statuses and stall reports name a segment, where
// a reducer has the number of an iteration. Step 0: before the first one.
constexpr int64_t iteration_of(SegmentKind kind, int64_t step) {
  return kFirstSegment + static_cast<int64_t>(kind) * kStepsOfKind + step;
}

// "iteration 7"; for a segment "the backward of step 7", or "step 7" if the
// kind is unknown.
std::string describe_iteration(int64_t iteration);

// "'head.bias': float32, shape [10], on cpu", and the strides of a tensor that
// is not contiguous; an empty name is omitted. The device has no index, because
// ranks use different ones.
std::string describe_tensor(std::string_view name, const at::Tensor& tensor);

// "a, b, c, d, e and 7 more": lists name_of(i) for the first five i < count.
template <typename NameOf>
std::string shortened_list(size_t count, const NameOf& name_of,
                           const char* separator = ", ") {
  constexpr size_t kMost = 5;
  std::string text;
  for (size_t i = 0; i < std::min(count, kMost); ++i) {
    absl::StrAppend(&text, i == 0 ? "" : separator, name_of(i));
  }
  if (count > kMost) absl::StrAppend(&text, " and ", count - kMost, " more");
  return text;
}

template <typename T>
struct RanksOfValue {
  T value;
  std::vector<int> ranks;
};

// Groups ranks that hold the same value, in order of their lowest rank.
template <typename T>
std::vector<RanksOfValue<T>> ranks_by_value(const std::vector<T>& by_rank) {
  std::vector<RanksOfValue<T>> groups;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    auto group =
        std::ranges::find(groups, by_rank[rank], &RanksOfValue<T>::value);
    if (group == groups.end()) {
      groups.push_back({by_rank[rank], {}});
      group = groups.end() - 1;
    }
    group->ranks.push_back(static_cast<int>(rank));
  }
  return groups;
}

// "rank 0 has X, ranks 1, 2 have Y". Omits values without text. `one`,
// `several`: the words after one rank and after several.
template <typename T>
std::string describe_by_value(const std::vector<T>& by_rank,
                              const char* one = " has ",
                              const char* several = " have ",
                              const char* separator = ", ") {
  std::string text;
  for (const RanksOfValue<T>& group : ranks_by_value(by_rank)) {
    const std::string value = absl::StrCat(group.value);
    if (value.empty()) continue;
    absl::StrAppend(&text, text.empty() ? "" : separator,
                    describe_ranks(group.ranks),
                    group.ranks.size() == 1 ? one : several, value);
  }
  return text;
}

}  // namespace brigade

#endif  // BRIGADE_COMM_ERRORS_ERROR_TEXTS_H_
