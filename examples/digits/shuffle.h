// A shuffle that gives the same order with every standard library.
//
// std::shuffle and std::uniform_int_distribution may differ from one library to
// the next; std::mt19937 and the Fisher-Yates shuffle below may not.

#ifndef BRIGADE_EXAMPLES_DIGITS_SHUFFLE_H_
#define BRIGADE_EXAMPLES_DIGITS_SHUFFLE_H_

#include <cstdint>
#include <random>
#include <utility>
#include <vector>

namespace brigade::digits {

// A number in [0, bound), each equally likely.
// REQUIRES: bound > 0.
inline uint64_t draw_below(uint64_t bound, std::mt19937& random) {
  constexpr uint64_t kRange = uint64_t{1} << 32;
  const uint64_t limit = kRange - kRange % bound;
  uint64_t drawn = random();
  while (drawn >= limit) drawn = random();
  return drawn % bound;
}

inline void shuffle(std::vector<int64_t>& values, std::mt19937& random) {
  for (size_t i = values.size(); i > 1; --i) {
    std::swap(values[i - 1], values[draw_below(i, random)]);
  }
}

}  // namespace brigade::digits

#endif  // BRIGADE_EXAMPLES_DIGITS_SHUFFLE_H_
