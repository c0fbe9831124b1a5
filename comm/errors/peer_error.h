// Failures of peers and of the network: the exception, its context, and the
// liveness probe that finds the ranks that still answer.

#ifndef BRIGADE_COMM_ERRORS_PEER_ERROR_H_
#define BRIGADE_COMM_ERRORS_PEER_ERROR_H_

#include <c10/util/Exception.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace brigade {

// A peer or the network failed. Python sees
// torch.distributed.DistBackendError.
class PeerError : public c10::DistBackendError {
  using c10::DistBackendError::DistBackendError;
};

struct LivenessProbe {
  std::vector<std::optional<int64_t>> answers = {};  // by rank
  std::chrono::milliseconds timeout{0};
  std::vector<int> lost = {};    // ranks whose processes have ended
  std::string store_error = {};  // empty: the store worked

  std::vector<int> absent() const;  // ranks without an answer

  // "ranks 0, 2 answered a liveness probe, rank 1 did not within 2 s", or "...
  // did not: its process has ended", and the store's error.
  std::string describe() const;
};

// Publishes this rank's `value` under `key` in the group's store, and collects
// the other ranks' values until all have answered or the timeout expires. With
// timeout 0, only publishes. A key is equal on all ranks and serves one probe.
//
// A rank answers after it has noticed the failure. Close the group before this
// call or right after it: otherwise ranks that wait for a living rank notice
// nothing, and do not answer.
//
// `lost` returns the ranks whose processes have ended; another thread calls it,
// possibly after this function has returned. If no other ranks are missing, the
// probe ends after 300 ms.
//
// Never throws. Returns at most 1 s after the timeout even if the store hangs;
// the thread that waits for the store is then leaked.
LivenessProbe probe_liveness(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, std::string_view key,
    int64_t value, std::chrono::milliseconds timeout,
    std::function<std::vector<int>()> lost = {});

// Throws PeerError "<context>: <message of cause>. <description of the probe>".
// A message that was cut keeps its "...".
//
// These pass unchanged: a PeerError, which has its context; a caller's mistake
// (ValueError, TypeError, IndexError, NotImplementedError); and a failure of
// this machine (OutOfMemoryError, AcceleratorError).
[[noreturn]] void throw_peer_error(
    std::string_view context, const std::exception_ptr& cause,
    const LivenessProbe* liveness_probe = nullptr);

// Throws c10::ValueError with the status's message, for every code: functions
// that return a status fail on their arguments only.
inline void throw_if_error(const absl::Status& status) {
  TORCH_CHECK_VALUE(status.ok(), std::string(status.message()));
}

template <typename T>
T value_or_throw(absl::StatusOr<T> result) {
  throw_if_error(result.status());
  return *std::move(result);
}

}  // namespace brigade

#endif  // BRIGADE_COMM_ERRORS_PEER_ERROR_H_
