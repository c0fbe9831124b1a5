#include <c10/util/Exception.h>

#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/comm/agreement.h"
#include "brigade/comm/errors/error_texts.h"
#include "brigade/comm/group/group_info.h"
#include "brigade/python_bindings/registrations.h"

namespace brigade {

void register_groups(py::module_& module) {
  module.def(
      "require_agreement",
      [](const c10::intrusive_ptr<c10d::ProcessGroup>& group,
         const std::string& what, const std::vector<std::string>& items,
         const std::string& failure) {
        const absl::Status status = failure.empty()
                                        ? absl::OkStatus()
                                        : absl::InvalidArgumentError(failure);
        try {
          require_agreement(group, what, items, status);
        } catch (const c10::ValueError& error) {
          TORCH_CHECK(false, error.what_without_backtrace());
        }
      },
      py::arg("group"), py::arg("what"), py::arg("items"),
      py::arg("failure") = "", py::call_guard<py::gil_scoped_release>(),
      "Collective. Raises RuntimeError on every rank alike, naming the first "
      "item in which ranks differ; `what` is the name of one item. If some "
      "ranks give a `failure`, what has gone wrong there, it says that "
      "instead.");
  module.def("suggest_control_device", &suggest_control_device,
             py::arg("group"), py::arg("device"),
             "Where a group of devices alone is to move what ranks tell each "
             "other, unless it is bound to one. The first call stands.");
  module.def("describe_tensor", &describe_tensor, py::arg("name"),
             py::arg("tensor"),
             "Name, dtype, sizes, strides and kind of device, as text.");
}

}  // namespace brigade
