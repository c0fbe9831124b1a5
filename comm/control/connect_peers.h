// Connects a rank to some of the others by way of the group's store.
//
// A rank publishes one key, and reads one of each peer.  Strangers that come to
// its port are turned away: a peer shows the number that it found in the store.
// Internal to comm/.

#ifndef BRIGADE_COMM_CONTROL_CONNECT_PEERS_H_
#define BRIGADE_COMM_CONTROL_CONNECT_PEERS_H_

#include <chrono>
#include <map>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "brigade/comm/control/owned_socket.h"

namespace brigade {

struct PeersToConnect {
  int rank = 0;
  std::vector<int> peers = {};  // each of which names this rank, too
  std::string address = {};     // numeric, of this machine
};

// Collective over `store`, of which nothing else has been written by these
// ranks.  Returns connected sockets by peer.  A peer may not have accepted its
// one yet.
//
// Errors: RuntimeError if a peer can't be reached, or does not come in time;
// what the store throws.
std::map<int, OwnedSocket> connect_peers(
    const c10::intrusive_ptr<c10d::Store>& store, const PeersToConnect& own,
    std::chrono::milliseconds timeout);

// Which of two ranks connects to the other, by the addresses that they have
// published: the lower.  But one beside the store is known by loopback, which
// means nothing elsewhere; it connects to one that is elsewhere.
bool connects(int rank, const std::string& address, int peer,
              const std::string& peer_address);

}  // namespace brigade

#endif  // BRIGADE_COMM_CONTROL_CONNECT_PEERS_H_
