// Who sends to whom in an exchange among many ranks, each of which is to know
// of all: in round k a rank tells the one 2^k ahead what it knows, modulo the
// number of ranks.
//
//   rank 0 of 5:  round 0 to 1 from 4,  round 1 to 2 from 3,  round 2 to 4 from
//   1
//
// Before round k a rank knows of the 2^k ranks up to itself; after the last of
// all, of some twice where the number of ranks is no power of two.
//
// Thread safety: pure functions.

#ifndef BRIGADE_COMM_CONTROL_EXCHANGE_ROUNDS_H_
#define BRIGADE_COMM_CONTROL_EXCHANGE_ROUNDS_H_

#include <algorithm>
#include <bit>
#include <vector>

namespace brigade {

// The smallest number of rounds after which all can know of all: log2, rounded
// up.
constexpr int num_rounds(int size) {
  return static_cast<int>(std::bit_width(static_cast<unsigned>(size - 1)));
}

constexpr int target_of(int rank, int size, int round) {
  return (rank + (1 << round)) % size;
}

constexpr int source_of(int rank, int size, int round) {
  return (rank + size - (1 << round)) % size;
}

// Of how many ranks a rank tells in `round`, itself first and then downwards,
// if nothing is to be told twice.
constexpr int num_told(int size, int round) {
  return std::min(1 << round, size - (1 << round));
}

// Sources and targets of all rounds, ascending.
inline std::vector<int> neighbours_of(int rank, int size) {
  std::vector<int> ranks;
  for (int round = 0; round < num_rounds(size); ++round) {
    ranks.push_back(target_of(rank, size, round));
    ranks.push_back(source_of(rank, size, round));
  }
  std::ranges::sort(ranks);
  const auto repeated = std::ranges::unique(ranks);
  ranks.erase(repeated.begin(), repeated.end());
  return ranks;
}

}  // namespace brigade

#endif  // BRIGADE_COMM_CONTROL_EXCHANGE_ROUNDS_H_
