// Waits for the results of an iteration's collectives, and delivers or drops
// them.
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_REDUCER_DELIVERY_H_
#define BRIGADE_REDUCER_DELIVERY_H_

#include <ATen/core/Tensor.h>

#include <chrono>
#include <optional>
#include <utility>
#include <vector>

#include "brigade/comm_hooks/hook_traits.h"
#include "brigade/observing/timeline_recorder.h"
#include "brigade/reducer/collective.h"
#include "brigade/reducer/iteration.h"

namespace brigade {

// Waits for all results, also after an error: nothing may write into a bucket's
// memory behind the user's back. Delivers each as it comes up to the first
// error, unless the iteration is a shadow.
std::optional<Failure> deliver_as_results_come(Iteration& iteration,
                                               TimelineRecorder& timeline);

using Results = std::vector<std::pair<Collective*, at::Tensor>>;

// Waits for the results of a user's hook, `timeout` each, also after an error.
// What the hook did that gives ranks different results is a failure too.
std::optional<Failure> collect(Iteration& iteration, const HookTraits& hook,
                               TimelineRecorder& timeline,
                               std::chrono::milliseconds timeout,
                               Results& results);

// Delivers what collect() has returned, up to the first error, unless the
// iteration is a shadow.
std::optional<Failure> deliver(const Iteration& iteration,
                               const Results& results);

// Waits for all that an aborted iteration has launched, `timeout` each, so that
// nothing writes into memory of the user's later. Results and their errors are
// dropped.
void drain(Iteration& iteration, std::chrono::milliseconds timeout);

}  // namespace brigade

#endif  // BRIGADE_REDUCER_DELIVERY_H_
