// What the parts of an engine share: launching, delivery, recovery.
//
// Thread safety: none; the engine's lock covers it, but for what is constant.

#ifndef BRIGADE_ENGINE_STATE_ENGINE_STATE_H_
#define BRIGADE_ENGINE_STATE_ENGINE_STATE_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/engine/state/backward_membership.h"
#include "brigade/engine/state/engine_options.h"
#include "brigade/engine/state/iteration.h"
#include "brigade/engine/state/observations.h"
#include "brigade/engine/state/occasion.h"
#include "brigade/engine/state/peer_status.h"
#include "brigade/engine/state/phase.h"
#include "brigade/engine/state/reduction_policy.h"

namespace brigade {

// Of a user's hook, to see whether its continuations launch collectives.
inline constexpr int64_t kWatchedIterations = 5;

struct UnconfirmedEnd {
  std::shared_ptr<Iteration> iteration;
  RankStatus sent;
};

struct EngineState {
  // Constant.
  const c10::intrusive_ptr<c10d::ProcessGroup> group;
  ReductionPolicy& policy;
  const EngineOptions options;
  const size_t num_replicas;
  const size_t num_parameters;
  const std::function<std::string()> describe_progress;  // takes the lock

  Observations observations = {};
  Phase phase = Phase::kIdle;
  std::shared_ptr<Iteration> iteration = {};  // null iff is_between(phase)
  BackwardMembership membership = {};
  PeerStatus peers;
  // Of iterations that were delivered before all ranks were known to have ended
  // them, oldest first.
  std::deque<UnconfirmedEnd> unconfirmed_ends = {};
  // Why results that were delivered are wrong; empty: they are right.
  std::string late_failure = {};
  // Continuations of the hook are watched up to this iteration.
  int64_t watches_continuations_until = kWatchedIterations;

  size_t num_variables() const { return num_replicas * num_parameters; }
  size_t number_of(VariableIndex variable) const {
    return variable.replica * num_parameters + variable.parameter;
  }
  VariableIndex variable(size_t number) const {
    return {.replica = number / num_parameters,
            .parameter = number % num_parameters};
  }
  Occasion occasion(int64_t number) const {
    return {.iteration = number, .rank = group->getRank()};
  }

  // Of the sequence as it is now.
  std::shared_ptr<Iteration> make_iteration(int64_t number) const {
    return std::make_shared<Iteration>(
        Preparation{.number = observations.prepared, .iteration = number},
        policy.sequence(), num_variables());
  }

  // Whatever phase it was in, it is over on this rank. Null if there is none.
  std::shared_ptr<Iteration> take_iteration();

  // REQUIRES: there is one.
  UnconfirmedEnd take_oldest_end();

  // Nothing is launched any more. The first words are kept.
  void failed(const std::exception_ptr& error);

  // The policy has another sequence.
  void adopt_sequence();

  // Closes the group's connections. `reason` is what later calls throw.
  void close_group(std::string_view reason);

  // The same, after `last` has told the peers.
  void leave_group(RankStatus last);

  // True if the host does not wait for results: all of them are on devices.
  bool runs_ahead() const;
};

}  // namespace brigade

#endif  // BRIGADE_ENGINE_STATE_ENGINE_STATE_H_
