#include "brigade/comm/errors/error_texts.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <array>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace brigade {

std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& known) {
    return known.what_without_backtrace();
  } catch (const std::exception& unknown) {
    return unknown.what();
  } catch (...) {
    return "an unknown exception";
  }
}

std::string describe_ranks(std::span<const int> ranks) {
  if (ranks.empty()) return "no rank";
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t first = 0; first < ranks.size();) {
    size_t last = first;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) {
      ++last;
    }
    if (last - first < 2) last = first;  // a pair is listed as two
    absl::StrAppend(&text, first > 0 ? ", " : "", ranks[first]);
    if (last > first) absl::StrAppend(&text, "-", ranks[last]);
    first = last + 1;
  }
  return text;
}

void check_process(const char* user, pid_t maker) {
  TORCH_CHECK(getpid() == maker, user, ": expected use in process ", maker,
              ", which made it, found process ", getpid(),
              ", which was forked from it.\nMake the group and its users after "
              "the fork.");
}

std::string counted(size_t count, std::string_view noun) {
  return absl::StrCat(count, " ", std::string(noun), count == 1 ? "" : "s");
}

std::string describe_unit(std::string_view name) {
  return name.empty() ? "the outermost unit"
                      : absl::StrCat("unit '", std::string(name), "'");
}

std::string describe_seconds(std::chrono::milliseconds time) {
  return absl::StrFormat("%.1f s", static_cast<double>(time.count()) / 1000.0);
}

std::string describe_iteration(int64_t iteration) {
  constexpr std::array kParts = {
      "the forward of ", "the backward without gradient synchronization of ",
      "the backward of ", ""};
  if (iteration < kFirstSegment) return absl::StrCat("iteration ", iteration);
  const int64_t step = iteration % kStepsOfKind;
  if (step == 0) return "construction";
  return absl::StrCat(kParts.at(iteration / kStepsOfKind % kParts.size()),
                      "step ", step);
}

std::string describe_dtype(at::ScalarType dtype) {
  return std::string(c10::getDtypeNames(dtype).first);
}

std::string describe_tensor(std::string_view name, const at::Tensor& tensor) {
  std::string text;
  if (!name.empty()) absl::StrAppend(&text, "'", std::string(name), "': ");
  absl::StrAppend(&text, describe_dtype(tensor.scalar_type()), ", shape [",
                  absl::StrJoin(tensor.sizes(), ", "), "], ");
  if (!tensor.is_contiguous()) {
    absl::StrAppend(&text, "strides [", absl::StrJoin(tensor.strides(), ", "),
                    "], ");
  }
  absl::StrAppend(&text, "on ",
                  c10::DeviceTypeName(tensor.device().type(), true));
  return text;
}

}  // namespace brigade
