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
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "brigade/comm/roll_call.h"

namespace brigade {

class FailureChannel {
 public:
  // Ranks must make their reducers on a group in the same order.
  explicit FailureChannel(c10::intrusive_ptr<c10d::ProcessGroup> group);

  // Tells the other ranks that this one is done with `iteration` after
  // launching `num_launched` buckets, and that its backward threw. Does not
  // wait, does not throw.
  void announce(int64_t iteration, size_t num_launched);

  // Announces it, and remembers that buckets are left that peers may have
  // launched.
  void require_realignment(int64_t iteration, size_t num_launched);

  bool needs_realignment() const { return abandoned_.has_value(); }

  // Buckets that this rank has to launch to be where its peers are: [begin,
  // end).
  struct LaunchRange {
    size_t begin = 0;
    size_t end = 0;
  };

  // Waits for the announcements of all ranks, up to the group's timeout.
  //
  // REQUIRES: needs_realignment(). Errors: DistBackendError naming the ranks
  // that did not give up the iteration; then realignment is still needed.
  LaunchRange agree_on_launches();

  // One more bucket of the range has been launched; all have.
  void advance() { ++abandoned_->num_launched; }
  void realigned() { abandoned_.reset(); }

  // Which ranks still answer after a collective failed; nullopt if there is
  // nobody to ask. `occasion` is unique, and equal on all ranks. Waits a few
  // seconds at most.
  std::optional<RollCall> call_survivors(const std::string& occasion);

 private:
  struct Abandoned {
    int64_t iteration = 0;
    size_t num_launched = 0;
  };

  std::string abandoned_key(int64_t iteration) const;

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::string prefix_;  // equal on all ranks; empty: no store to talk through
  std::optional<Abandoned> abandoned_;
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_FAILURE_CHANNEL_H_
