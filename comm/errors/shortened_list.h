// The names in a message where there may be thousands.

#ifndef BRIGADE_COMM_ERRORS_SHORTENED_LIST_H_
#define BRIGADE_COMM_ERRORS_SHORTENED_LIST_H_

#include <algorithm>
#include <cstddef>
#include <string>

#include "absl/strings/str_cat.h"

namespace brigade {

// "a, b, c, d, e and 7 more": five at most. `name_of(i)`, i < count.
template <typename NameOf>
std::string shortened_list(size_t count, const NameOf& name_of,
                           const char* separator = ", ") {
  constexpr size_t kMost = 5;
  std::string text;
  for (size_t i = 0; i < std::min(count, kMost); ++i) {
    absl::StrAppend(&text, i == 0 ? "" : separator, name_of(i));
  }
  if (count > kMost) absl::StrAppend(&text, " and ", count - kMost, " more");
  return text;
}

}  // namespace brigade

#endif  // BRIGADE_COMM_ERRORS_SHORTENED_LIST_H_
