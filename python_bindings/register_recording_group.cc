#include "brigade/python_bindings/register_recording_group.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "brigade/comm/recording_group.h"

namespace brigade {

void register_recording_group(py::module_& module) {
  module.def(
      "recording_group",
      [](int world_size) { return RecordingGroup(world_size).group(); },
      py::arg("world_size"),
      "A group of one process that answers at once, as if all ranks held what "
      "this one holds: for what a program costs beside its network. This rank "
      "is 0. Its log grows with each collective.");
}

}  // namespace brigade
