// Finds out after a failure which ranks still answer, through the group's
// store.
//
// A rank answers when it has noticed the failure: abort() the group before the
// call or right after it, so that ranks notice that do not wait for the dead
// one.

#ifndef BRIGADE_COMM_ERRORS_LIVENESS_PROBE_H_
#define BRIGADE_COMM_ERRORS_LIVENESS_PROBE_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
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
  // did not: its process has ended", and the store's error.
  std::string describe() const;
};

// Publishes this rank's `value` under `key` in the group's store, and collects
// the others' until all have answered or `patience` is over. A key, equal on
// all ranks, serves one probe. Without patience, only publishes.
//
// `lost`: returns the ranks whose processes are known to have ended; called on
// another thread, possibly after this function has returned. Once only these
// are missing, waits 300 ms more: they may have answered before.
//
// Never throws. Returns within `patience` and a second even if the store hangs;
// a thread then stays behind that waits for the store.
LivenessProbe probe_liveness(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, std::string_view key,
    int64_t value, std::chrono::milliseconds patience,
    std::function<std::vector<int>()> lost = {});

}  // namespace brigade

#endif  // BRIGADE_COMM_ERRORS_LIVENESS_PROBE_H_
