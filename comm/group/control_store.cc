#include "brigade/comm/group/control_store.h"

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "brigade/comm/group/tcp_store_of.h"

namespace brigade {

c10::intrusive_ptr<c10d::Store> control_store(c10d::ProcessGroup& group) {
  c10::intrusive_ptr<c10d::Store> store = group.getStore();
  return tcp_store_of(store) ? store->clone() : store;
}

}  // namespace brigade
