// A collective that has failed: the error, its place, and whose fault it is: a
// peer's or the network's, or a comm hook's own.
//
// Thread safety: values and pure functions.

#ifndef BRIGADE_REDUCER_FAILURE_H_
#define BRIGADE_REDUCER_FAILURE_H_

#include <exception>
#include <string>

#include "brigade/reducer/collective.h"
#include "brigade/reducer/iteration.h"

namespace brigade {

enum class ErrorSource {
  kHook,      // thrown when the hook was called
  kFuture,    // held by the future that it returned
  kDelivery,  // of handing its value out as gradients
};

struct Failure {
  std::exception_ptr error;
  ErrorSource source = ErrorSource::kFuture;
  Collective* collective = nullptr;
  std::string where = {};  // describes it, which may be gone by then
};

// Of the exception that is being handled.
Failure failure_of(const Iteration& iteration, ErrorSource source,
                   Collective& collective);

// DistBackendError always is a peer's failure. Of a collective that only the
// network makes fail, so is all that is not a wrong value or type; of a user's
// hook, what its future holds and c10 does not know (Gloo's own exceptions).
bool is_peer_failure(const Failure& failure);

// Rethrows the error with its place in the text. c10's errors keep their type;
// others become a RuntimeError.
[[noreturn]] void rethrow_hook_error(const Failure& failure);

// "bucket 1 of 3 (parameter 4) in iteration 17 on rank 2".
std::string describe_place(const Collective& collective, Occasion occasion);

}  // namespace brigade

#endif  // BRIGADE_REDUCER_FAILURE_H_
