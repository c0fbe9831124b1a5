#include "brigade/comm/rank_status.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace brigade {
namespace {

constexpr std::string_view kCut = "...";

bool continues_a_character(char c) {
  return (static_cast<unsigned char>(c) & 0xC0) == 0x80;
}

}  // namespace

StatusText status_text(std::string_view words) {
  StatusText text = {};
  if (words.size() <= text.size()) {
    std::copy(words.begin(), words.end(), text.begin());
    return text;
  }
  size_t length = text.size() - kCut.size();
  while (length > 0 && continues_a_character(words[length])) --length;
  std::copy_n(words.begin(), length, text.begin());
  std::copy(kCut.begin(), kCut.end(), text.begin() + length);
  return text;
}

std::string_view words_of(const StatusText& text) {
  return {text.data(), strnlen(text.data(), text.size())};
}

std::string describe_status(const RankStatus& rank_status,
                            std::string_view unit_name) {
  const std::string iteration =
      absl::StrCat("iteration ", rank_status.iteration);
  const std::string unit =
      rank_status.unit < 0
          ? ""
          : absl::StrCat(std::string(unit_name), " ", rank_status.unit);
  switch (rank_status.kind) {
    case StatusKind::kIdle:
      return "ran no backward in " + iteration +
             (rank_status.unit < 0 ? "" : " and is behind another forward");
    case StatusKind::kBegin: {
      const std::string_view words = words_of(rank_status.text);
      return "began " + iteration +
             (words.empty() ? "" : " (" + std::string(words) + ")");
    }
    case StatusKind::kLaunch:
      return absl::StrCat("was to launch ",
                          unit.empty() ? "a collective" : unit, " of ",
                          iteration, ", ", rank_status.numel, " elements");
    case StatusKind::kEnd:
      return absl::StrCat("ended ", iteration, " after ", rank_status.launches,
                          rank_status.launches == 1 ? " launch" : " launches");
    case StatusKind::kArrived:
      return "has the results of " + iteration;
    case StatusKind::kFailed: {
      std::string failure = "failed in " + iteration;
      if (!unit.empty()) failure += " at " + unit;
      const std::string_view words = words_of(rank_status.text);
      if (!words.empty()) failure += ": " + std::string(words);
      return failure;
    }
  }
  return absl::StrCat("sent a rank_status of unknown kind ",
                      static_cast<int64_t>(rank_status.kind));
}

}  // namespace brigade
