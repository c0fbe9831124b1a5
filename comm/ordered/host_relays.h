// Who passes on what comes from other hosts, so that it comes to a host once:
// each rank's is sent to one rank of each other host, which hands it to those
// beside it. The ranks of a host take turns, by their places there.
//
//   4 ranks, two of each host:  HostRelays relays(/*rank=*/3, {0, 0, 2, 2});
//   relays.receivers();         // 1, of the other host, as rank 3 is the
//   second relays.origins_of(3);       // 1 relays.origins_of(2);       // 0
//
// Where hosts have one rank each everybody sends to everybody.
//
// Thread safety: immutable.

#ifndef BRIGADE_COMM_ORDERED_HOST_RELAYS_H_
#define BRIGADE_COMM_ORDERED_HOST_RELAYS_H_

#include <vector>

namespace brigade {

class HostRelays {
 public:
  // `hosts`: by rank, equal for ranks of one host, and the same on all ranks.
  HostRelays(int rank, const std::vector<int>& hosts);

  // Those that get what this rank sends to other hosts; from the next rank on,
  // so that not all send to the same one first.
  const std::vector<int>& receivers() const { return receivers_; }

  // Ranks of other hosts whose messages `rank` gets, in rising order.
  const std::vector<int>& origins_of(int rank) const { return origins_[rank]; }

 private:
  std::vector<int> receivers_;
  std::vector<std::vector<int>> origins_;  // by rank
};

}  // namespace brigade

#endif  // BRIGADE_COMM_ORDERED_HOST_RELAYS_H_
