// Tells the errors of a collective apart: a peer's or the network's,
// or a comm hook's own.

#ifndef BRIGADE_ENGINE_STATE_COLLECTIVE_ERROR_H_
#define BRIGADE_ENGINE_STATE_COLLECTIVE_ERROR_H_

#include <exception>
#include <string>

namespace brigade {

enum class ErrorSource {
  kHook,      // thrown when the hook was called
  kFuture,    // held by the future that it returned
  kDelivery,  // of handing its value out as gradients
};

// DistBackendError always is. Of a collective that only the network makes fail,
// so is all that is not a wrong value or type; of a user's hook, what its
// future holds and c10 does not know (Gloo's own exceptions).
bool is_peer_failure(const std::exception_ptr& error, ErrorSource source,
                     bool fails_by_network_only);

// Rethrows with `where` in the text. c10's errors keep their type; others
// become a RuntimeError.
[[noreturn]] void rethrow_hook_error(const std::exception_ptr& error,
                                     const std::string& where);

}  // namespace brigade

#endif  // BRIGADE_ENGINE_STATE_COLLECTIVE_ERROR_H_
