// What the reducers of different ranks tell each other after a failure.
//
// They talk through the group's store, since the group itself may be dead or
// out of step. A group without a store (or a world of 1) is taken to fail alike
// on all ranks. docs/protocol.md, "Failure".
//
// Thread safety: none; the reducer's lock covers it.

#ifndef BRIGADE_REDUCER_FAILURE_CHANNEL_H_
#define BRIGADE_REDUCER_FAILURE_CHANNEL_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "brigade/comm/roll_call.h"

namespace brigade {

class FailureChannel {
 public:
  // Ranks must make their reducers on a group in the same order.
  explicit FailureChannel(c10::intrusive_ptr<c10d::ProcessGroup> group);

  // Tells the other ranks that this one gave up `iteration` after launching
  // `num_launched` buckets. Does not wait, does not throw.
  void announce_abandoned(int64_t iteration, size_t num_launched);

  // True from an announcement until realigned().
  bool needs_realignment() const { return abandoned_.has_value(); }

  struct LaunchRange {
    size_t begin = 0;  // buckets that this rank has launched
    size_t end = 0;    // the most that any rank has launched
  };

  // What this rank has to launch to be where its peers are. Waits for the
  // announcements of all ranks, up to the group's timeout.
  //
  // Errors: DistBackendError naming the ranks that did not give up the
  // iteration; then realignment is still needed.
  LaunchRange agree_on_launches();
  void realigned() { abandoned_.reset(); }

  // Which ranks still answer after a collective failed; nullopt if there is
  // nobody to ask. Waits a few seconds at most.
  std::optional<RollCall> call_survivors(int64_t iteration);

 private:
  struct Abandoned {
    int64_t iteration = 0;
    size_t num_launched = 0;
  };

  std::string key(std::string_view what, int64_t iteration) const;

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::string prefix_;  // equal on all ranks; empty: no store to talk through
  std::optional<Abandoned> abandoned_;
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_FAILURE_CHANNEL_H_
