// The error of a failed peer or network, and how other failures become
// exceptions.
//
// Gloo's errors, for one, are plain std::exceptions that name an address.

#ifndef BRIGADE_COMM_ERRORS_PEER_ERROR_H_
#define BRIGADE_COMM_ERRORS_PEER_ERROR_H_

#include <c10/util/Exception.h>

#include <exception>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace brigade {

struct LivenessProbe;

// A peer or the network failed. Python sees
// torch.distributed.DistBackendError.
class PeerError : public c10::DistBackendError {
  using c10::DistBackendError::DistBackendError;
};

// Throws PeerError "<context>: <message of cause>. <description of the probe>".
// A text that was cut keeps its "...".
//
// Three kinds pass unchanged: a PeerError, which has its context already; a
// caller's mistake (ValueError, TypeError, IndexError, NotImplementedError);
// and a failure of this machine (OutOfMemoryError, AcceleratorError).
[[noreturn]] void throw_peer_error(
    std::string_view context, const std::exception_ptr& cause,
    const LivenessProbe* liveness_probe = nullptr);

// Throws c10::ValueError with the status's message, for every code: pure code
// fails only on its arguments.
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
