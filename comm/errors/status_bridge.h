// The one place where an absl::Status becomes an exception: pure code returns
// Status, the LibTorch edge throws.

#ifndef BRIGADE_COMM_ERRORS_STATUS_BRIDGE_H_
#define BRIGADE_COMM_ERRORS_STATUS_BRIDGE_H_

#include <c10/util/Exception.h>

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace brigade {

// Errors: c10::ValueError with the status's message, for every code: pure code
// fails only on what it is given.
inline void throw_if_error(const absl::Status& status) {
  TORCH_CHECK_VALUE(status.ok(), std::string(status.message()));
}

template <typename T>
T value_or_throw(absl::StatusOr<T> result) {
  throw_if_error(result.status());
  return *std::move(result);
}

}  // namespace brigade

#endif  // BRIGADE_COMM_ERRORS_STATUS_BRIDGE_H_
