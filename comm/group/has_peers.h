// Whether a rank can talk to the others of its group.

#ifndef BRIGADE_COMM_GROUP_HAS_PEERS_H_
#define BRIGADE_COMM_GROUP_HAS_PEERS_H_

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace brigade {

// False for a group of one, one without a store, and torch's `fake` one, whose
// collectives go nowhere: its ranks are taken to be identical.
bool has_peers(c10d::ProcessGroup& group);

}  // namespace brigade

#endif  // BRIGADE_COMM_GROUP_HAS_PEERS_H_
