// Which ranks share a row of a mesh, and which a column: those of a row hold
// the parts of parameters, those of a column the same part.

#ifndef BRIGADE_FSDP_TRANSPORT_MESH_RANKS_H_
#define BRIGADE_FSDP_TRANSPORT_MESH_RANKS_H_

#include <numeric>
#include <vector>

namespace brigade {

// Of the row that `rank` is in, `num_shards` ranks in rising order. Of a number
// that divides that one: its neighbours in the row.
inline std::vector<int> row_of(int rank, int num_shards) {
  std::vector<int> ranks(num_shards);
  std::iota(ranks.begin(), ranks.end(), rank / num_shards * num_shards);
  return ranks;
}

// Of its column.
inline std::vector<int> column_of(int rank, int num_shards, int num_ranks) {
  std::vector<int> ranks;
  for (int r = rank % num_shards; r < num_ranks; r += num_shards) {
    ranks.push_back(r);
  }
  return ranks;
}

}  // namespace brigade

#endif  // BRIGADE_FSDP_TRANSPORT_MESH_RANKS_H_
