#include "brigade/planning/launch_order.h"

#include <algorithm>

namespace brigade {

void LaunchOrder::mark_all() {
  std::fill(pending_.begin(), pending_.end(), size_t{0});
}

}  // namespace brigade
