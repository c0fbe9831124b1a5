// Whether steps are planned by their calls or as one of them was recorded.
//
// A program that is not as its plan expects is planned as it was recorded: once
// it has done the same twice, so that one which does this and that in turns
// does not have all memory made anew again and again. The first three steps are
// believed: in the third one all comes in the order that ranks agreed on.
//
// What takes less for long, nine steps, is planned anew too: by its calls if
// these are enough, as they have room for gradients that come in another order.
//
// Thread safety: none.

#ifndef BRIGADE_FSDP_SCHEDULE_STEP_PLANS_H_
#define BRIGADE_FSDP_SCHEDULE_STEP_PLANS_H_

#include <functional>
#include <span>
#include <vector>

#include "brigade/fsdp/schedule/memory_uses.h"

namespace brigade {

struct RecordedStep {
  std::vector<RecordedUse> uses = {};
  // The plan's buffers are enough for it, but perhaps for peers that kept a
  // reduction waiting for longer than is waited for.
  bool is_as_planned = true;
};

class StepPlans {
 public:
  // A step is over. Returns whether the next is to be planned otherwise.
  // `calls_suffice`: whether a plan of calls is enough for such a step.
  bool follow(RecordedStep step,
              const std::function<bool(std::span<const RecordedUse> step)>&
                  calls_suffice);

  // Units are called otherwise, which a plan of calls knows best.
  void calls_differ() { planned_.clear(); }

  // What the next step is planned as; empty: by its calls.
  const std::vector<RecordedUse>& planned() const { return planned_; }

 private:
  std::vector<RecordedUse> planned_;
  std::vector<RecordedUse> last_;
  int num_steps_ = 0;  // as many as matter
  int num_alike_ = 0;  // steps before the last that were the same
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_SCHEDULE_STEP_PLANS_H_
