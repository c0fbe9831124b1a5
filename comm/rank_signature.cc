#include "brigade/comm/rank_signature.h"

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

SignatureText signature_text(std::string_view words) {
  SignatureText text = {};
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

std::string_view words_of(const SignatureText& text) {
  return {text.data(), strnlen(text.data(), text.size())};
}

std::string describe_signature(const RankSignature& signature,
                               std::string_view unit_name) {
  const std::string iteration = absl::StrCat("iteration ", signature.iteration);
  const std::string unit =
      signature.unit < 0
          ? ""
          : absl::StrCat(std::string(unit_name), " ", signature.unit);
  switch (signature.kind) {
    case SignatureKind::kIdle:
      return "ran no backward in " + iteration +
             (signature.unit < 0 ? "" : " and is behind another forward");
    case SignatureKind::kBegin: {
      const std::string_view words = words_of(signature.text);
      return "began " + iteration +
             (words.empty() ? "" : " (" + std::string(words) + ")");
    }
    case SignatureKind::kLaunch:
      return absl::StrCat("was to launch ",
                          unit.empty() ? "a collective" : unit, " of ",
                          iteration, ", ", signature.numel, " elements");
    case SignatureKind::kEnd:
      return absl::StrCat("ended ", iteration, " after ", signature.launches,
                          signature.launches == 1 ? " launch" : " launches");
    case SignatureKind::kArrived:
      return "has the results of " + iteration;
    case SignatureKind::kFailed: {
      std::string failure = "failed in " + iteration;
      if (!unit.empty()) failure += " at " + unit;
      const std::string_view words = words_of(signature.text);
      if (!words.empty()) failure += ": " + std::string(words);
      return failure;
    }
  }
  return absl::StrCat("sent a signature of unknown kind ",
                      static_cast<int64_t>(signature.kind));
}

}  // namespace brigade
