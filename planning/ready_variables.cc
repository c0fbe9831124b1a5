#include "brigade/planning/ready_variables.h"

namespace brigade {

std::vector<size_t> ReadyVariables::missing() const {
  std::vector<size_t> variables;
  for (size_t i = 0; i < ready_.size(); ++i) {
    if (!is_ready(i)) variables.push_back(i);
  }
  return variables;
}

}  // namespace brigade
