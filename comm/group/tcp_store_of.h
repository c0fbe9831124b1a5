// The TCPStore behind a group's store.
//
// Thread safety: pure.

#ifndef BRIGADE_COMM_GROUP_TCP_STORE_OF_H_
#define BRIGADE_COMM_GROUP_TCP_STORE_OF_H_

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace brigade {

// Null if `store` is of another kind, or null.  Lives as long as `store`.
inline c10d::TCPStore* tcp_store_of(
    const c10::intrusive_ptr<c10d::Store>& store) {
  if (auto* prefix = dynamic_cast<c10d::PrefixStore*>(store.get())) {
    return dynamic_cast<c10d::TCPStore*>(
        prefix->getUnderlyingNonPrefixStore().get());
  }
  return dynamic_cast<c10d::TCPStore*>(store.get());
}

}  // namespace brigade

#endif  // BRIGADE_COMM_GROUP_TCP_STORE_OF_H_
