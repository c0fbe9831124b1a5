#include "brigade/comm/backends/gloo_backend.h"

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <utility>

#include "brigade/comm/backends/gloo_connections.h"
#include "brigade/comm/backends/sigpipe_block.h"

namespace brigade {
namespace {

class GlooBackend final : public c10d::ProcessGroupGloo {
 public:
  using c10d::ProcessGroupGloo::ProcessGroupGloo;

  void abort() override { end_gloo_operations(contexts_); }
};

c10::intrusive_ptr<c10d::Backend> make_backend(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
    std::chrono::milliseconds timeout, GlooDevices devices) {
  auto options = c10d::ProcessGroupGloo::Options::create(timeout);
  options->threads = static_cast<int>(devices.size()) * 2;
  options->devices = std::move(devices);
  return c10::make_intrusive<GlooBackend>(store, rank, world_size, options);
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_gloo_backend(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
    std::chrono::milliseconds timeout, std::vector<std::string> interfaces) {
  const SigpipeBlock inherited_by_its_threads;
  return make_backend(store, rank, world_size, timeout,
                      open_gloo_devices(std::move(interfaces)));
}

c10::intrusive_ptr<c10d::Backend> make_gloo_backend_beside(
    c10d::ProcessGroup& group, const c10::intrusive_ptr<c10d::Store>& store,
    std::chrono::milliseconds timeout) {
  const SigpipeBlock inherited_by_its_threads;
  GlooDevices devices = gloo_devices_of(group);
  if (devices.empty()) devices = open_gloo_devices({});
  return make_backend(store, group.getRank(), group.getSize(), timeout,
                      std::move(devices));
}

}  // namespace brigade
