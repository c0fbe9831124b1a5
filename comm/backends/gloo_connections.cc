#include "brigade/comm/backends/gloo_connections.h"

#include <c10/util/Exception.h>
#include <gloo/transport/unbound_buffer.h>

#include <chrono>
#include <cstdlib>
#include <exception>
#include <sstream>
#include <string_view>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "brigade/comm/backends/sigpipe_block.h"
#include "brigade/comm/group/find_backend.h"

namespace brigade {
namespace {

using c10d::ProcessGroupGloo;

constexpr const char* kInterfaces = "GLOO_SOCKET_IFNAME";

std::vector<std::string> interfaces_from_environment() {
  std::vector<std::string> interfaces;
  const char* value = std::getenv(kInterfaces);
  if (value == nullptr || *value == '\0') return interfaces;
  std::istringstream list(value);
  for (std::string name; std::getline(list, name, ',');) {
    TORCH_CHECK_VALUE(!name.empty(), "environment variable ", kInterfaces,
                      " must list network interfaces such as 'eth0,eth1', got "
                      "'",
                      value, "'.");
    interfaces.push_back(name);
  }
  return interfaces;
}

// A device tells it as part of its description only:
// "tcp, pci=, iface=lo, speed=-1, addr=[127.0.0.1]".
std::string address_of(const ::gloo::transport::Device& device) {
  constexpr std::string_view kLabel = "addr=";
  const std::string description = device.str();
  const size_t label = description.find(kLabel);
  if (label == std::string::npos) return "";
  const size_t begin =
      description.find_first_not_of('[', label + kLabel.size());
  const size_t end = description.find_first_of("], ", begin);
  return description.substr(begin, end - begin);
}

}  // namespace

GlooDevices open_gloo_devices(std::vector<std::string> interfaces) {
  if (interfaces.empty()) interfaces = interfaces_from_environment();
  GlooDevices devices;
  for (const std::string& name : interfaces) {
    devices.push_back(ProcessGroupGloo::createDeviceForInterface(name));
  }
  if (devices.empty()) {
    devices.push_back(ProcessGroupGloo::createDefaultDevice());
  }
  return devices;
}

GlooDevices gloo_devices_of(c10d::ProcessGroup& group) {
  const auto backend = find_backend(group, at::kCPU);
  auto* gloo = dynamic_cast<ProcessGroupGloo*>(backend.get());
  return gloo == nullptr ? GlooDevices() : gloo->getOptions()->devices;
}

std::string gloo_address_of(c10d::ProcessGroup& group) {
  const GlooDevices devices = gloo_devices_of(group);
  return devices.empty() ? "" : address_of(*devices.front());
}

std::string default_gloo_address() {
  const SigpipeBlock inherited_by_its_threads;
  return address_of(*open_gloo_devices({}).front());
}

// A wait that times out ends all operations of its context, which closing the
// connections alone would not: that is heard by the peers only.
void end_gloo_operations(const GlooContexts& contexts) {
  for (const auto& context : contexts) {
    char unused = 0;
    auto buffer = context->createUnboundBuffer(&unused, sizeof(unused));
    try {
      buffer->waitRecv(std::chrono::milliseconds(1));
    } catch (const std::exception&) {
      // It has timed out, as it was meant to.
    }
  }
}

namespace {

// Names a member that only derived classes may name.
struct OpenGloo : ProcessGroupGloo {
  static constexpr auto kContexts = &OpenGloo::contexts_;
};

}  // namespace

bool end_gloo_operations_of(c10d::Backend& backend) {
  auto* const gloo = dynamic_cast<ProcessGroupGloo*>(&backend);
  if (gloo == nullptr) return false;
  end_gloo_operations(gloo->*OpenGloo::kContexts);
  return true;
}

}  // namespace brigade
