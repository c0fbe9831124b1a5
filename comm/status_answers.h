// A backend that answers status exchanges by itself, because its peers are
// not there: the recording group's.

#ifndef BRIGADE_COMM_STATUS_ANSWERS_H_
#define BRIGADE_COMM_STATUS_ANSWERS_H_

#include <vector>

#include "brigade/comm/rank_status.h"

namespace brigade {

class AnswersStatuses {
 public:
  // The statuses of all ranks, this one's included, by rank.  Called when
  // `own` is sent.
  virtual std::vector<RankStatus> answer_status(const RankStatus& own) = 0;

 protected:
  ~AnswersStatuses() = default;
};

}  // namespace brigade

#endif  // BRIGADE_COMM_STATUS_ANSWERS_H_
