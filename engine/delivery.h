// What becomes of the results of collectives: waited for, delivered, or made an
// error that says whose they are.
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_ENGINE_DELIVERY_H_
#define BRIGADE_ENGINE_DELIVERY_H_

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>

#include "brigade/engine/collective_error.h"
#include "brigade/engine/engine_state.h"
#include "brigade/engine/iteration.h"

namespace brigade {

// Waits for the results of an iteration that all ranks have launched to its
// end, also after an error: nothing may write into an entry's memory behind the
// user's back. Delivers them, unless the iteration is a shadow, and tells the
// policy of the end.
//
// What a built-in hook's future holds is right on all ranks or on none, and is
// delivered as it comes. A user's hook may fail on one rank alone, so that
// ranks tell each other before anybody delivers.
//
// `has_agreed_proposal`: what ranks told each other at its end.
//
// Errors: what a collective or a hook failed with, and of a user's hook on all
// ranks alike.
void deliver_all(EngineState& state, Iteration& iteration,
                 bool has_agreed_proposal);

// The same where peers may not have ended it yet: tells them `end` and does not
// wait for theirs (confirm_ends() does). A user's hook's results come first; if
// they fail, peers are told of that instead, and waited for. Errors: as
// deliver_all(), but of a user's hook on this rank only, on the others in
// confirm_end(). REQUIRES: may_defer_status_check().
void deliver_unconfirmed(EngineState& state,
                         const std::shared_ptr<Iteration>& iteration,
                         const RankStatus& end);

// Waits for the entries of its group up to this one and delivers them.
// REQUIRES: they have been launched. Errors: as deliver_all().
void deliver_through(EngineState& state, Iteration& iteration, size_t entry);

struct Failure {
  std::exception_ptr error;
  ErrorSource source = ErrorSource::kFuture;
  Collective* collective = nullptr;
  std::string where = {};  // describes it, which may be gone by then
};

// Of the exception that is being handled.
Failure failure_of(const EngineState& state, const Iteration& iteration,
                   ErrorSource source, Collective& collective);

// Throws it with its place in front. A peer's failure ends the group and is
// told to those that still answer. REQUIRES: its collective is there.
[[noreturn]] void throw_failure(EngineState& state, const Failure& failure,
                                int64_t iteration);

// "bucket 1 of 3 (parameter 4) in iteration 17 on rank 2".
std::string describe_place(const EngineState& state,
                           const Collective& collective, int64_t iteration);

}  // namespace brigade

#endif  // BRIGADE_ENGINE_DELIVERY_H_
