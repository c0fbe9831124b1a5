#include <pybind11/stl.h>

#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "brigade/checkpoint/checkpoint_model.h"
#include "brigade/checkpoint/optimizer_state.h"
#include "brigade/checkpoint/tensor_files.h"
#include "brigade/fsdp/segmented_model.h"
#include "brigade/python_bindings/registrations.h"

namespace brigade {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;
using Values = std::map<std::string, at::Tensor>;  // by field
using SteppedParameter =
    std::tuple<at::Tensor, size_t, std::vector<std::string>, Values>;

OptimizerState make_state(std::string type, std::vector<std::string> options,
                          const std::vector<SteppedParameter>& parameters) {
  OptimizerState state = {
      .type = std::move(type), .options = std::move(options), .parameters = {}};
  for (const auto& [parameter, group, fields, values] : parameters) {
    state.parameters.push_back({.parameter = parameter,
                                .group = group,
                                .fields = fields,
                                .values = values});
  }
  return state;
}

CheckpointModel whole_model(const NamedTensors& parameters,
                            const NamedTensors& buffers,
                            const std::optional<Group>& group) {
  CheckpointModel model(std::vector<CheckpointTensor>(),
                        group.value_or(single_process_group()));
  for (const auto& [name, tensor] : parameters) {
    model.tensors.push_back(unsharded_tensor(name, tensor));
  }
  for (const auto& [name, tensor] : buffers) {
    model.tensors.push_back(unsharded_tensor(name, tensor));
    model.tensors.back().is_optional = true;
  }
  return model;
}

}  // namespace

void register_checkpoints(py::module_& module) {
  py::class_<OptimizerState>(module, "OptimizerState",
                             "See checkpoint/optimizer_state.h.")
      .def(py::init(&make_state), py::kw_only(), py::arg("type"),
           py::arg("options"), py::arg("parameters"),
           "`options`: JSON by group. `parameters`: (parameter, index of its "
           "group, names of its fields, current values by field).")
      .def_readonly("options", &OptimizerState::options)
      .def_property_readonly(
          "values",
          [](const OptimizerState& state) {
            std::vector<Values> values;
            for (const auto& each : state.parameters) {
              values.push_back(each.values);
            }
            return values;
          },
          "Values by field, of each parameter.");
  py::class_<CheckpointModel>(module, "CheckpointModel",
                              "See checkpoint/checkpoint_model.h.")
      .def(py::init(
               [](SegmentedModel& model) { return checkpoint_model(model); }),
           NoGil(), py::keep_alive<1, 2>(), "Collective.")
      .def(py::init(&whole_model),
           "An unsharded model of the group's ranks; without a group, of this "
           "process.");
  module.def(
      "save_checkpoint",
      [](const CheckpointModel& model, bool in_shards, const std::string& path,
         const CheckpointMetadata& metadata, const OptimizerState* state) {
        save_with_state(
            path,
            in_shards ? CheckpointLayout::kFolder : CheckpointLayout::kFile,
            model, state, metadata);
      },
      NoGil(), "Collective.");
  module.def(
      "load_checkpoint",
      [](const CheckpointModel& model, const std::string& path,
         OptimizerState* state) {
        LoadedCheckpoint loaded = load_with_state(path, model, state);
        return std::pair(std::move(loaded.metadata),
                         std::move(loaded.warnings));
      },
      NoGil(),
      "Collective. Returns the metadata and warnings; fills `optimizer` unless "
      "it is None.");
  module.def(
      "fail_checkpoint",
      [](const Group& group, const std::string& failure) {
        on_all_ranks(group, [&] { TORCH_CHECK_VALUE(false, failure); });
      },
      NoGil(),
      "Collective. Matches the peers' save_checkpoint() or load_checkpoint(): "
      "all ranks raise `failure`.");
}

}  // namespace brigade
