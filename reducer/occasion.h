// When and where something happened, for messages.
//
// Thread safety: a value.

#ifndef BRIGADE_REDUCER_OCCASION_H_
#define BRIGADE_REDUCER_OCCASION_H_

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"

namespace brigade {

struct Occasion {
  int64_t iteration = 0;
  int rank = 0;
};

// "iteration 17 on rank 2".
inline std::string describe(Occasion occasion) {
  return absl::StrCat("iteration ", occasion.iteration, " on rank ",
                      occasion.rank);
}

}  // namespace brigade

#endif  // BRIGADE_REDUCER_OCCASION_H_
