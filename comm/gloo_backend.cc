#include "brigade/comm/gloo_backend.h"

#include <c10/util/Exception.h>
#include <gloo/transport/unbound_buffer.h>

#include <cstdlib>
#include <exception>
#include <sstream>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

namespace brigade {
namespace {

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

class GlooBackend final : public c10d::ProcessGroupGloo {
 public:
  using c10d::ProcessGroupGloo::ProcessGroupGloo;

  // A wait that times out ends all operations of its context, which closing the
  // connections alone would not: that is heard by the peers only.
  void abort() override {
    for (const auto& context : contexts_) {
      char unused = 0;
      auto buffer = context->createUnboundBuffer(&unused, sizeof(unused));
      try {
        buffer->waitRecv(std::chrono::milliseconds(1));
      } catch (const std::exception&) {
        // It has timed out, as it was meant to.
      }
    }
  }
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_gloo_backend(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
    std::chrono::milliseconds timeout, std::vector<std::string> interfaces) {
  using c10d::ProcessGroupGloo;
  if (interfaces.empty()) interfaces = interfaces_from_environment();
  auto options = ProcessGroupGloo::Options::create(timeout);
  for (const std::string& name : interfaces) {
    options->devices.push_back(
        ProcessGroupGloo::createDeviceForInterface(name));
  }
  if (options->devices.empty()) {
    options->devices.push_back(ProcessGroupGloo::createDefaultDevice());
  }
  options->threads = static_cast<int>(options->devices.size()) * 2;
  return c10::make_intrusive<GlooBackend>(store, rank, world_size, options);
}

}  // namespace brigade
