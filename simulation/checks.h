// Range checks of the simulator's inputs.

#ifndef BRIGADE_SIMULATION_CHECKS_H_
#define BRIGADE_SIMULATION_CHECKS_H_

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace brigade {

// Integers without exponent.
inline std::string number_text(double value) {
  const bool is_integer = std::abs(value) < 1e15 && value == std::floor(value);
  return is_integer ? absl::StrCat(static_cast<int64_t>(value))
                    : absl::StrCat(value);
}

// Errors: InvalidArgument, which names `place` and `name`, unless `value` is in
// the range. NaN is in none.
inline absl::Status check_range(std::string_view place, std::string_view name,
                                double value, double least, double most) {
  if (value >= least && value <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(std::string(place), ": expected ", std::string(name),
                   " from ", number_text(least), " to ", number_text(most),
                   ", found ", number_text(value)));
}

inline absl::Status first_error(std::initializer_list<absl::Status> statuses) {
  for (const absl::Status& status : statuses) {
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace brigade

#endif  // BRIGADE_SIMULATION_CHECKS_H_
