// Turns whatever a backend or a store throws into one kind of error, with the
// caller's words in front: which bucket, which iteration, which rank.
//
// Gloo's errors, for one, are plain std::exceptions that name an address.

#ifndef BRIGADE_COMM_ERRORS_PEER_ERROR_H_
#define BRIGADE_COMM_ERRORS_PEER_ERROR_H_

#include <c10/util/Exception.h>

#include <exception>
#include <string_view>

#include "brigade/comm/errors/liveness_probe.h"

namespace brigade {

// A peer or the network failed.  Python sees
// torch.distributed.DistBackendError.
class PeerError : public c10::DistBackendError {
  using c10::DistBackendError::DistBackendError;
};

// Throws PeerError "<context>: <what cause says>. <liveness probe's words>". A
// text that was cut keeps its "...".
//
// Three kinds pass unchanged: a PeerError, which has its context already; a
// caller's mistake (ValueError, TypeError, IndexError, NotImplementedError);
// and a failure of this machine (OutOfMemoryError, AcceleratorError).
[[noreturn]] void throw_peer_error(
    std::string_view context, const std::exception_ptr& cause,
    const LivenessProbe* liveness_probe = nullptr);

}  // namespace brigade

#endif  // BRIGADE_COMM_ERRORS_PEER_ERROR_H_
