// Where an engine stands: between two iterations, or how far it is in one.
//
// docs/protocol.md, "Phases", tells what leads from one to another.

#ifndef BRIGADE_REDUCER_PHASE_H_
#define BRIGADE_REDUCER_PHASE_H_

namespace brigade {

enum class Phase {
  kIdle,  // no iteration

  // One that has not begun.
  kPrepared,  // forward is done
  kReached,   // a backward goes through it; no gradient has come

  // One that has begun.
  kReducing,   // in a backward that brings gradients, or a shadow of its peers'
  kSuspended,  // between two such backwards, or waiting to be finalized

  // One that an error, which is on its way out, has ended: nothing is launched.
  kFailed,  // peers have not been told
  kOver,    // peers know, or can't be told
};

inline bool is_between(Phase phase) { return phase == Phase::kIdle; }
inline bool has_begun(Phase phase) { return phase >= Phase::kReducing; }
inline bool is_ending(Phase phase) { return phase >= Phase::kFailed; }

}  // namespace brigade

#endif  // BRIGADE_REDUCER_PHASE_H_
