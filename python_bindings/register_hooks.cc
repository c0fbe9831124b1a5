#include <c10/util/Exception.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "brigade/comm_hooks/chained_collectives.h"
#include "brigade/hooks/output_hooks.h"
#include "brigade/python_bindings/registrations.h"

namespace brigade {
namespace {

using FutureWrapper = torch::jit::PythonFutureWrapper;
using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

// Called, and destroyed, by threads that do not hold the GIL.
std::shared_ptr<py::object> kept(py::object object) {
  return {new py::object(std::move(object)), [](py::object* owned) {
            const py::gil_scoped_acquire gil;
            delete owned;
          }};
}

FuturePtr call(const py::object& launch, const c10::IValue& value) {
  const py::gil_scoped_acquire gil;
  const py::object second = launch(torch::jit::toPyObject(value));
  TORCH_CHECK_TYPE(py::isinstance<FutureWrapper>(second),
                   "then_collective: `launch` must return a "
                   "torch.futures.Future, it returned ",
                   std::string(py::repr(second)),
                   ".\nReturn the future of the collective it started.");
  return second.cast<std::shared_ptr<FutureWrapper>>()->fut;
}

std::shared_ptr<FutureWrapper> chain(const FutureWrapper& first,
                                     py::object launch) {
  NextCollective next =
      [launch = kept(std::move(launch))](const c10::IValue& value) {
        return call(*launch, value);
      };
  const py::gil_scoped_release no_gil;
  return std::make_shared<FutureWrapper>(
      then_collective(first.fut, std::move(next)));
}

}  // namespace

void register_hooks(py::module_& module) {
  module.def(
      "then_collective", &chain, py::arg("future"), py::arg("launch"),
      "A second collective behind the first one of a comm hook.\n\n"
      "`launch` is called with the value of `future` when backward ends, in "
      "the "
      "order of the buckets on every rank, and returns the future of what it "
      "launched. A continuation (`future.then`) must not launch collectives: "
      "continuations run in another order on each rank.\n\n"
      "What `launch` raises comes out of backward, and ends the group's use: "
      "peers wait for the collective. Outside of a comm hook, waits for "
      "`future` and calls `launch` at once. Raises TypeError if `launch` "
      "returns no future.");
  module.def(
      "tie_outputs",
      [](const std::vector<at::Tensor>& outputs, bool copies) {
        return tie_outputs(outputs, copies);
      },
      py::arg("outputs"), py::arg("copies") = true,
      py::call_guard<py::gil_scoped_release>(),
      "Stand-ins for tensors: a backward from some of them goes through all, "
      "so "
      "that with find_unused_parameters the loss may leave outputs out (the "
      "wrapper's forward does it itself). copies=False: they share the "
      "outputs' "
      "memory, and must not be changed in place. One backward per forward.");
}

}  // namespace brigade
