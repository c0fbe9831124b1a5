#include "brigade/comm/group/group_collectives.h"

#include <string_view>

namespace brigade {

void throw_if_not_supported(const c10::Error& error, c10::Device device) {
  const std::string_view text = error.what_without_backtrace();
  const auto has = [&](const char* part) {
    return text.find(part) != std::string_view::npos;
  };
  const bool has_backend = !has("No backend type associated");
  if (has_backend && !has("does not support all_to_all_single") &&
      !has("does not support alltoall_base")) {
    return;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      false,
      "sums in the order of the ranks: expected a process group with an "
      "all-to-all for tensors on ",
      device, ", found none (", text,
      ").\nUse a group over Gloo for the CPU or NCCL for CUDA, or leave out "
      "`reproducible`.");
}

}  // namespace brigade
