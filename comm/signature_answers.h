// A backend that answers signature exchanges by itself, because its peers are
// not there: the recording group's.

#ifndef BRIGADE_COMM_SIGNATURE_ANSWERS_H_
#define BRIGADE_COMM_SIGNATURE_ANSWERS_H_

#include <vector>

#include "brigade/comm/rank_signature.h"

namespace brigade {

class AnswersSignatures {
 public:
  // The signatures of all ranks, this one's included, by rank.  Called when
  // `own` is sent.
  virtual std::vector<RankSignature> answer_signature(
      const RankSignature& own) = 0;

 protected:
  ~AnswersSignatures() = default;
};

}  // namespace brigade

#endif  // BRIGADE_COMM_SIGNATURE_ANSWERS_H_
