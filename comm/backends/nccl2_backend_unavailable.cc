#include "brigade/comm/backends/nccl2_backend.h"

namespace brigade {

c10::intrusive_ptr<c10d::Backend> make_nccl2_backend(
    const c10::intrusive_ptr<c10d::Store>&, int, int, std::chrono::milliseconds,
    const std::string&) {
  return nullptr;
}

}  // namespace brigade
