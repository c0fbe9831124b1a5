// The signatures of several ranks in one: whether they agree, and if not,
// whose failure is to be told first.
//
// Thread safety: values and pure functions.

#ifndef BRIGADE_COMM_SIGNATURE_DIGEST_H_
#define BRIGADE_COMM_SIGNATURE_DIGEST_H_

#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>

#include "brigade/comm/rank_signature.h"

namespace brigade {

// A signature and the rank that has sent it.
struct SignatureOf {
  int64_t rank = 0;
  RankSignature signature = {};
};

// Travels as it lies in memory.
struct SignatureDigest {
  // Of the lowest rank that has failed; else of the lowest rank.
  SignatureOf first = {};
  int64_t all_agree = 1;  // check_signatures() of all is OK
};

static_assert(sizeof(SignatureDigest) == 272);
static_assert(std::is_trivially_copyable_v<SignatureDigest>);

SignatureDigest digest_of(int rank, const RankSignature& signature);

// Order and repetition don't matter.
SignatureDigest combine(const SignatureDigest& a, const SignatureDigest& b);

// That of which a failure is told, if any rank has failed.
std::optional<SignatureOf> first_failure(const SignatureDigest& digest);

// "rank 3 failed in iteration 7: bad input"
std::string describe(const SignatureOf& told);

}  // namespace brigade

#endif  // BRIGADE_COMM_SIGNATURE_DIGEST_H_
