// What the backends made of Gloo share: the network devices they open, and how
// their operations are ended.
//
// With gloo_backend.cc, all that sees Gloo's own
// headers.  Internal to comm/.

#ifndef BRIGADE_COMM_BACKENDS_GLOO_CONNECTIONS_H_
#define BRIGADE_COMM_BACKENDS_GLOO_CONNECTIONS_H_

#include <gloo/context.h>
#include <gloo/transport/device.h>

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace brigade {

using GlooDevices = std::vector<std::shared_ptr<::gloo::transport::Device>>;
using GlooContexts = std::vector<std::shared_ptr<::gloo::Context>>;

// One per interface; if there are none, those that GLOO_SOCKET_IFNAME lists; if
// that is not set either, the one of this machine's host name, or loopback.
// Errors: c10::ValueError for an empty name in GLOO_SOCKET_IFNAME.
GlooDevices open_gloo_devices(std::vector<std::string> interfaces);

// Those of the group's Gloo backend; none if it has no such backend.
GlooDevices gloo_devices_of(c10d::ProcessGroup& group);

// The numeric address of the group's Gloo backend; empty if it has no such
// backend.
std::string gloo_address_of(c10d::ProcessGroup& group);

// The one that Gloo would choose. Errors: as open_gloo_devices().
std::string default_gloo_address();

// All operations in flight end with an error, here and at the peers, and so do
// later ones.
void end_gloo_operations(const GlooContexts& contexts);

// The same for a backend, if it is Gloo's; else returns false.
bool end_gloo_operations_of(c10d::Backend& backend);

}  // namespace brigade

#endif  // BRIGADE_COMM_BACKENDS_GLOO_CONNECTIONS_H_
