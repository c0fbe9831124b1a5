// Of how many ranks exchanges of statuses are tested.

#ifndef BRIGADE_TESTS_COMM_WORLD_SIZES_H_
#define BRIGADE_TESTS_COMM_WORLD_SIZES_H_

#include <vector>

namespace brigade::testing {

inline std::vector<int> world_sizes() {
  std::vector<int> sizes;
  for (int size = 2; size <= 17; ++size) sizes.push_back(size);
  sizes.push_back(32);
  sizes.push_back(64);
  return sizes;
}

}  // namespace brigade::testing

#endif  // BRIGADE_TESTS_COMM_WORLD_SIZES_H_
