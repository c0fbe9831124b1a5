// The store through which brigade's own connections are made.
//
// A client of a TCPStore is one connection with a lock, which is held while one
// thread waits for a key: another thread's peers may need that lock to get to
// where the key is set.  So waiting is done over a connection of one's own.
//
// Thread safety: that of the store.

#ifndef BRIGADE_COMM_GROUP_CONTROL_STORE_H_
#define BRIGADE_COMM_GROUP_CONTROL_STORE_H_

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace brigade {

// The group's store, over another connection where it is a TCPStore's client;
// null if the group has none.
c10::intrusive_ptr<c10d::Store> control_store(c10d::ProcessGroup& group);

}  // namespace brigade

#endif  // BRIGADE_COMM_GROUP_CONTROL_STORE_H_
