// The address of this machine at which brigade's own connections are made.
//
// A machine's host name may resolve to an address that others can't reach
// (127.0.1.1 on Debian).  The group's store, however, is reached by all: the
// address from which this rank reaches it is reached by its peers as well.
//
// Thread safety: any thread.

#ifndef BRIGADE_COMM_CONTROL_CONTROL_ADDRESS_H_
#define BRIGADE_COMM_CONTROL_CONTROL_ADDRESS_H_

#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace brigade {

// Numeric, of this rank; empty if Gloo's own choice is to be used:
// GLOO_SOCKET_IFNAME is set, or the store is no TCPStore.  Loopback for a rank
// on the machine where the store lies.
std::string control_address(const c10::intrusive_ptr<c10d::Store>& store);

// The numeric address from which this machine sends to `host`; nothing is sent.
// Nullopt if there is no way there.
std::optional<std::string> source_address_towards(const std::string& host);

bool is_loopback(const std::string& address);

}  // namespace brigade

#endif  // BRIGADE_COMM_CONTROL_CONTROL_ADDRESS_H_
