// A backend that answers status exchanges by itself, because its peers are
// not there: the recording group's.

#ifndef BRIGADE_COMM_CONTROL_STATUS_ANSWERS_H_
#define BRIGADE_COMM_CONTROL_STATUS_ANSWERS_H_

#include <memory>

#include "brigade/comm/control/rank_status.h"
#include "brigade/comm/control/status_exchange.h"

namespace brigade {

class AnswersStatuses {
 public:
  // The exchange that this rank begins with `own`. It may be over, or end at
  // any time, on any thread.
  virtual std::shared_ptr<StatusExchange> exchange_status(
      const RankStatus& own) = 0;

 protected:
  ~AnswersStatuses() = default;
};

}  // namespace brigade

#endif  // BRIGADE_COMM_CONTROL_STATUS_ANSWERS_H_
