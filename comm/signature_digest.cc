#include "brigade/comm/signature_digest.h"

#include <tuple>

#include "absl/strings/str_cat.h"
#include "brigade/comm/signature_check.h"

namespace brigade {
namespace {

bool has_failed(const SignatureOf& told) {
  return told.signature.kind == SignatureKind::kFailed;
}

}  // namespace

SignatureDigest digest_of(int rank, const RankSignature& signature) {
  const SignatureOf first = {.rank = rank, .signature = signature};
  return {.first = first, .all_agree = has_failed(first) ? 0 : 1};
}

SignatureDigest combine(const SignatureDigest& a, const SignatureDigest& b) {
  const auto place = [](const SignatureDigest& digest) {
    return std::tuple(!has_failed(digest.first), digest.first.rank);
  };
  return {.first = place(b) < place(a) ? b.first : a.first,
          .all_agree = a.all_agree != 0 && b.all_agree != 0 &&
                       agree(a.first.signature, b.first.signature)};
}

std::optional<SignatureOf> first_failure(const SignatureDigest& digest) {
  if (!has_failed(digest.first)) return std::nullopt;
  return digest.first;
}

std::string describe(const SignatureOf& told) {
  return absl::StrCat("rank ", told.rank, " ",
                      describe_signature(told.signature));
}

}  // namespace brigade
