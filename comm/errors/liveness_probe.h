// Asks, after a failure, which ranks are still there.
//
// Goes through the group's store, since the group itself is broken by then: one
// key for all ranks, where the store can append to it. Never used while all is
// well.
//
// A rank answers when it has noticed the failure, and one that does not wait
// for the dead rank itself notices late.  So abort() the group before the call,
// or at the latest right after it: it is of no use any more, and its end is
// what the others notice.

#ifndef BRIGADE_COMM_ERRORS_LIVENESS_PROBE_H_
#define BRIGADE_COMM_ERRORS_LIVENESS_PROBE_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace brigade {

struct LivenessProbe {
  std::vector<std::optional<int64_t>> answers = {};  // by rank
  std::chrono::milliseconds patience{0};
  std::vector<int> lost = {};    // ranks whose processes have ended
  std::string store_error = {};  // empty while the store could be reached

  // "ranks 0, 2 answered a liveness probe, rank 1 did not within 2 s", or "...
  // did not: its process has ended"; the store's error, if there is one, is
  // added.
  std::string describe() const;
};

// Publishes this rank's `value` under `key` in the group's store, and collects
// the others' until all have answered or `patience` is over.  Ranks that want
// to hear each other use the same key; a key serves one liveness probe. Without
// patience, only answers, for others to find later.
//
// `lost`: returns the ranks whose processes are known to have ended; called on
// another thread, maybe after this function has returned. Once nobody else is
// missing, these are waited for 300 ms only: they may have answered before.
//
// Never throws, and returns within `patience` and a second even when the
// machine that serves the store hangs; a thread is then left behind that waits
// for it.
LivenessProbe probe_liveness(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, std::string_view key,
    int64_t value, std::chrono::milliseconds patience,
    std::function<std::vector<int>()> lost = {});

// "rank 3", "ranks 0, 2, 5-9".
std::string describe_ranks(std::span<const int> ranks);

}  // namespace brigade

#endif  // BRIGADE_COMM_ERRORS_LIVENESS_PROBE_H_
