#include "brigade/comm/gloo_backend.h"

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <utility>

#include "brigade/comm/gloo_connections.h"
#include "brigade/comm/sigpipe_block.h"

namespace brigade {
namespace {

class GlooBackend final : public c10d::ProcessGroupGloo {
 public:
  using c10d::ProcessGroupGloo::ProcessGroupGloo;

  void abort() override { end_gloo_operations(contexts_); }
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_gloo_backend(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
    std::chrono::milliseconds timeout, std::vector<std::string> interfaces) {
  const SigpipeBlock inherited_by_its_threads;
  auto options = c10d::ProcessGroupGloo::Options::create(timeout);
  options->devices = open_gloo_devices(std::move(interfaces));
  options->threads = static_cast<int>(options->devices.size()) * 2;
  return c10::make_intrusive<GlooBackend>(store, rank, world_size, options);
}

}  // namespace brigade
