// What runs between a unit's last gradient and its reduction, of a list of
// events in order.

#ifndef BRIGADE_TESTS_FSDP_LAUNCH_PATH_H_
#define BRIGADE_TESTS_FSDP_LAUNCH_PATH_H_

#include <algorithm>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

namespace brigade::testing {

inline constexpr std::string_view kLastGradient = "the last gradient is there";

// They take no kernel.
inline bool makes_a_view(std::string_view name) {
  constexpr std::string_view kViews[] = {"aten::as_strided", "aten::detach",
                                         "aten::empty",      "aten::narrow",
                                         "aten::slice",      "aten::view"};
  return std::ranges::find(kViews, name) != std::end(kViews);
}

// By reduction: the operators behind the last gradient, up to the first event
// that `is_reduction`.
template <typename IsReduction>
std::vector<std::vector<std::string>> operators_before_reductions(
    const std::vector<std::string>& events, const IsReduction& is_reduction) {
  std::vector<std::vector<std::string>> found;
  bool is_between = false;
  for (const std::string& event : events) {
    if (event == kLastGradient) {
      found.emplace_back();
      is_between = true;
    } else if (is_reduction(event)) {
      is_between = false;
    } else if (is_between && event.starts_with("aten::") &&
               !makes_a_view(event)) {
      found.back().push_back(event);
    }
  }
  return found;
}

}  // namespace brigade::testing

#endif  // BRIGADE_TESTS_FSDP_LAUNCH_PATH_H_
