#include "brigade/comm/close_group.h"

#include <exception>
#include <stdexcept>

#include "brigade/comm/backends/gloo_backend.h"
#include "brigade/comm/ordered/ordered_collectives.h"

namespace brigade {
namespace {

void close_backend(c10d::Backend& backend) {
  try {
    if (!end_gloo_operations_of(backend)) backend.abort();
  } catch (const std::exception&) {
    // This backend can't: peers wait for their timeout.
  }
}

}  // namespace

void close_group(c10d::ProcessGroup& group) noexcept {
  try {
    OrderedCollectives::abort_all_of(
        group,
        std::make_exception_ptr(std::runtime_error("the group was closed")));
    for (const c10::Device& device : group.getDeviceTypes()) {
      close_backend(*group.getBackend(device.type()));
    }
  } catch (const std::exception&) {
    // A group without backends: written in Python, say.
  }
}

}  // namespace brigade
