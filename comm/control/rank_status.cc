#include "brigade/comm/control/rank_status.h"

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

int64_t num_launches(const RankStatus& rank_status) {
  int64_t launches = 0;
  for (const GroupCounts& counts : rank_status.by_group) {
    launches += counts.launches;
  }
  return launches;
}

std::string describe_status(const RankStatus& rank_status) {
  const std::string iteration =
      absl::StrCat("iteration ", rank_status.iteration);
  switch (rank_status.kind) {
    case StatusKind::kIdle:
      return "ran no backward in " + iteration +
             (rank_status.unit < 0 ? "" : " and is behind another forward");
    case StatusKind::kBegin: {
      const std::string_view words = words_of(rank_status.text);
      return "began " + iteration +
             (words.empty() ? "" : " (" + std::string(words) + ")");
    }
    case StatusKind::kAsk:
      return absl::StrCat(std::string(words_of(rank_status.text)), " behind ",
                          iteration);
    case StatusKind::kEnd: {
      const int64_t launches = num_launches(rank_status);
      if (launches == 0) return "ended " + iteration;
      return absl::StrCat("ended ", iteration, " after ", launches,
                          launches == 1 ? " launch" : " launches");
    }
    case StatusKind::kChained:
      return "has launched the second collectives of " + iteration;
    case StatusKind::kArrived:
      return "has the results of " + iteration;
    case StatusKind::kFollowUp:
      return "has heard of a failure before " + iteration;
    case StatusKind::kFailed: {
      std::string failure = "failed in " + iteration;
      if (rank_status.unit >= 0) {
        absl::StrAppend(&failure, " at launch ", rank_status.unit);
      }
      const std::string_view words = words_of(rank_status.text);
      if (!words.empty()) failure += ": " + std::string(words);
      return failure;
    }
  }
  return absl::StrCat("sent a status of unknown kind ",
                      static_cast<int64_t>(rank_status.kind));
}

}  // namespace brigade
